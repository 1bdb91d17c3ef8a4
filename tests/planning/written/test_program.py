"""Programs of a plan: what ``--write train.py`` writes runs as it is."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig

import nxdpp
from nxdpp.__main__ import main
from nxdpp.planning.layout import Layout
from nxdpp.planning.written.program import program
from tests.planning.test_plan_command import CONFIG
from tests.support.expert_models import mixtral
from tests.support.run_program import run_program

OPTIONS = ["--devices", "2", "--device-memory", "1GB", "--global-batch", "4", "--device", "cpu", "--link", "1GB/s"]
FIXED = ["--pipeline-parallel-size", "2", "--autocast", "bfloat16"]


def test_written_programs_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under autocast by the command, and in bfloat16: with deferred construction, and with shards."""
    configuration, file = tmp_path / "config.json", tmp_path / "train.py"
    configuration.write_text(json.dumps(CONFIG))
    assert main(["plan", str(tmp_path), *OPTIONS, *FIXED, "--write", str(file)]) == 0
    printed = capsys.readouterr().out
    command = f"torchrun --nproc-per-node 2 {file}"
    assert printed.endswith(f"The program is written. Its start:\n\n{command}\n")
    layout = Layout(tensor=2, checkpoint=True, zero=1)
    config = LlamaConfig.from_json_file(configuration)
    half = nxdpp.plan(
        config, devices=2, device_memory="1GB", global_batch=4, device="cpu", layouts=[layout], dtype="bfloat16"
    )
    source = program(replace(half, device_memory=1000), str(configuration))
    assert "deferred_init(lambda: LlamaForCausalLM(config).to(torch.bfloat16))" in source
    (tmp_path / "deferred.py").write_text(source)
    shards = nxdpp.plan(
        config,
        devices=2,
        device_memory="1GB",
        global_batch=4,
        device="cpu",
        layouts=[Layout(data=2, zero=3)],
        dtype="bfloat16",
        gradient_dtype="float32",
    )
    source = program(replace(shards, device_memory=1000), str(configuration))
    assert "deferred_init(lambda: LlamaForCausalLM(config))" in source
    (tmp_path / "sharded.py").write_text(source)
    (tmp_path / "mixture").mkdir()
    mixtral(2, vocab_size=64).config.to_json_file(tmp_path / "mixture" / "config.json")
    given = [str(tmp_path / "mixture"), *OPTIONS, "--expert-parallel-size", "2", "--seq-length", "16"]
    assert main(["plan", *given, "--write", str(tmp_path / "experts.py")]) == 0
    printed, source = capsys.readouterr().out, (tmp_path / "experts.py").read_text()
    assert "parameters: 13,520, 8,912 of them active\n" in printed
    assert "experts divided over 2 replicas" in printed
    assert "e2" in printed
    assert "initialize_model_parallel(expert_model_parallel_size=2)" in source
    assert "expert_parallelize(model)\nmodel = NxDPPModel(model" in source
    start = (
        'import runpy\n\nfor name in ("train", "deferred", "sharded", "experts"):\n    runpy.run_path(f"{name}.py")\n'
    )
    (tmp_path / "all.py").write_text(start)

    ended = run_program("all.py", [], 2, folder=tmp_path)

    assert ended.codes == [0] * 2, ended.output
    lines = re.findall(r"step \d: loss \d\.\d+", ended.output)
    assert len(lines) == 40


def test_a_program_of_many_stages_fits_a_terminal() -> None:
    config = LlamaConfig.from_dict(CONFIG | {"num_hidden_layers": 80})
    layouts = [Layout(pipeline=8, chunks=8, schedule="interleaved", data=2)]
    plan = nxdpp.plan(config, devices=16, hosts=2, device_memory="1GB", global_batch=32, device="cpu", layouts=layouts)

    source = program(plan, "config.json")

    compile(source, "train.py", "exec")
    assert max(map(len, [*source.splitlines(), plan.torchrun()])) <= 110
    assert 'f"model.layers.{layer}"' in source
