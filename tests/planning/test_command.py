"""``python -m nxdpp plan`` without a search: the prediction of a given layout, and errors."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    BeitConfig,
    PreTrainedConfig,
    T5Config,
)

from nxdpp.__main__ import main
from nxdpp.planning.text_table import bytes_text
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.tracing.costs import count as count_module
from tests.support.llama_405b import llama_3_1_405b

ROOT = Path(__file__).parents[2]
LAYOUT = ["--pipeline-parallel-size", "2", "--num-microbatches", "4"]

LLAMA_70B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}
T5: Any = T5Config  # accepts more arguments than it declares
MEASURE = """
import resource, sys
from nxdpp.__main__ import main
status = main(sys.argv[1:])
print("KiB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
sys.exit(status)
"""


def _write(folder: Path, content: Any) -> str:
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


def _rows(output: str) -> list[list[str]]:
    """Cells of the table of ranks: rank, seconds of compute and waits, bytes."""
    lines = output.split("\n\n")[2].splitlines()[2:]
    return [re.split(r" {2,}|(?<=B) |(?<=\d) (?=\d)", line) for line in lines if re.match(r"\d", line)]


def _plan(*arguments: str) -> int:
    return main(["plan", *arguments, "--num-microbatches", "4"])


def test_llama_405b_needs_no_memory_for_its_weights(tmp_path: Path) -> None:
    config = llama_3_1_405b()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    command = ["plan", str(tmp_path), "--pipeline-parallel-size", "8", "--num-microbatches", "16"]
    ended = subprocess.run(
        [sys.executable, "-c", MEASURE, *command, "--seq-length", "4096"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )

    assert ended.returncode == 0, ended.stderr
    assert [row[0] for row in _rows(ended.stdout)] == [*map(str, range(8))]
    assert "parameters: 405,853,388,800\n" in ended.stdout
    assert int(ended.stdout.split()[-1]) < 1.5 * 2**20


@pytest.mark.parametrize(
    ("config", "model"),
    [
        (BeitConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4), "BeitForImageClassification"),
        (
            T5(num_layers=2, d_model=64, num_heads=4, d_kv=16, d_ff=64, decoder_start_token_id=0),
            "T5ForConditionalGeneration",
        ),
    ],
)
def test_models_of_images_and_of_two_texts(
    config: PreTrainedConfig, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.save_pretrained(tmp_path)

    assert _plan(str(tmp_path), "--pipeline-parallel-size", "2") == 0, capsys.readouterr().err

    output = capsys.readouterr().out
    assert output.startswith(f"{model}, ")
    assert f"dtype: float32, as {model}(config) makes it" in output
    assert max(map(len, output.partition("\n\ntorchrun")[0].splitlines())) <= 80


def test_parts_for_images_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Inputs are tokens alone, so the work of the vision part is not planned."""
    text = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "vocab_size": 64}
    vision = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    sizes = {"text_config": text | {"num_attention_heads": 4, "num_key_value_heads": 2}, "vision_config": vision}
    folder = _write(tmp_path, {"model_type": "gemma3", **sizes})
    note = "vision_config: inputs are tokens alone. Its parameters count, its work and activations do not."

    assert _plan(folder, "--pipeline-parallel-size", "2", "--seq-length", "16") == 0
    assert note in capsys.readouterr().out.replace("\n  ", " ")
    assert _plan(folder, "--pipeline-parallel-size", "2", "--seq-length", "16", "--json") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["model"] == "Gemma3ForConditionalGeneration"
    assert note in printed.err


def test_no_row_is_wider_than_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole rows at any width of the terminal, and in a pipe."""
    folder = _write(tmp_path, LLAMA_70B | {"num_hidden_layers": 104, "hidden_size": 16384})
    monkeypatch.setenv("COLUMNS", "30")
    assert _plan(folder, "--pipeline-parallel-size", "52", "--seq-length", "64", "--schedule", "zb-v", "--details") == 0

    output = capsys.readouterr().out.partition("\n\ntorchrun")[0]
    assert max(map(len, output.splitlines())) <= 80
    assert len(_rows(output)) == 52


@pytest.mark.parametrize("name", ["1f1b", "dualpipe-v"])
def test_json_has_the_numbers_of_the_table(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _write(tmp_path, LLAMA_70B | {"num_hidden_layers": 4})
    given = [folder, "--pipeline-parallel-size", "2", "--seq-length", "64", "--schedule", name]
    assert _plan(*given) == 0
    rows = _rows(capsys.readouterr().out)
    assert _plan(*given, "--json") == 0

    found = json.loads(capsys.readouterr().out)
    (best,) = found["best"]
    assert bytes_text(best["peak_bytes"]) in [row[-1] for row in rows]
    assert [row[3] for row in rows] == [bytes_text(rank["weights"]) for rank in best["memory"]]
    assert (best["layout"]["schedule"], best["layout"]["chunks"]) == (name, FAMILIES[name].default_chunks)
    assert (best["microbatches"], len(best["cuts"])) == (4, 2 * FAMILIES[name].default_chunks - 1)
    assert found["dtype"] == "float32"


OPTIONS = [
    (["--schedule", "zb-v", "--virtual-pipeline-size", "3"], "zb-v has 2 stages per rank, not 3"),
    (["--schedule", "1f1b", "--virtual-pipeline-size", "2"], "1f1b has 1 stage per rank, not 2"),
    (["--schedule", "1f2b"], "there is no schedule '1f2b' (did you mean '1f1b'?). Choose one of gpipe, 1f1b,"),
    (["--dtype", "int8"], "dtype='int8' is no floating dtype of a model: choose one of float32, bfloat16"),
    (["--batch-size", "6"], "a batch of 6 does not divide into 4 microbatches"),
    (["--sequence-parallel"], "add --tensor-parallel-size"),
    (["--zero", "2"], "ZeRO-2 shares parameters among replicas, and there is one: add --data-parallel-size"),
    (["--best", "2"], "--best: for a search. Add --devices"),
    (["--devices", "8"], "--device-memory, --global-batch: missing"),
    (["--devices", "8", "--device-memory", "80", "--global-batch", "8"], "device_memory='80' is not understood"),
]
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from nxdpp.__main__ import main
for line in sys.stdin.read().splitlines():
    print(main(line.split()), file=sys.stderr)
"""


def test_wrong_options_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    """All in one process, in which an import of torch raises."""
    common = ["plan", _write(tmp_path, LLAMA_70B)]
    lines = [" ".join([*common, *([] if "--devices" in options else LAYOUT), *options]) for options, _ in OPTIONS]
    lines += [" ".join(["plan", str(tmp_path / "none"), *LAYOUT]), "plan config.json --best 2"]
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], input="\n".join(lines), capture_output=True, text=True, cwd=ROOT
    )

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == ""
    messages = ended.stderr.split("\n2\n")[:-1]
    expected = [message for _, message in OPTIONS] + ["no such file", "--best: for a search"]
    for found, message in zip(messages, expected, strict=True):
        assert message in found
        assert "\n" not in found


def test_equal_layers_are_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counted = 0
    count = count_module._count

    def watched(*arguments: Any, **options: Any) -> Any:
        nonlocal counted
        counted += 1
        return count(*arguments, **options)

    monkeypatch.setattr(count_module, "_count", watched)
    numbers = []
    for layers in (4, 40):
        counted = 0
        folder = _write(tmp_path, LLAMA_70B | {"num_hidden_layers": layers})
        assert _plan(folder, "--pipeline-parallel-size", "4", "--seq-length", "64") == 0
        numbers.append(counted)
    assert numbers[0] == numbers[1]


def test_a_device_memory_is_a_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """3 communicators of 100 MiB on each of 2 ranks; the model itself is tiny."""
    tiny = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}
    given = [_write(tmp_path, LLAMA_70B | tiny), "--pipeline-parallel-size", "2", "--seq-length", "8"]

    assert _plan(*given, "--device-memory", "250MiB") == 2
    assert "no layout fits into 0.2441 GiB of a device: the smallest one needs 0.2935 GiB" in capsys.readouterr().err
    assert _plan(*given, "--device-memory", "400MiB") == 0
    assert _plan(*given, "--device-memory", "250MiB", "--device", "cpu") == 0


REFUSED = [
    ({}, ["--pipeline-parallel-size", "82"], "81 layers, the head included, cannot be split over 82 stages"),
    ({"model_type": "lama"}, [], "model_type is 'lama', which the installed transformers does not know"),
    ({}, ["--seq-length", "200000"], "more than max_position_embeddings=131072"),
    ({"pad_token_id": 200000}, [], "LlamaForCausalLM cannot be built from this configuration"),
]


@pytest.mark.parametrize(("changes", "arguments", "message"), REFUSED)
def test_invalid_options(
    changes: dict[str, Any], arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _write(tmp_path, LLAMA_70B | changes)

    assert _plan(folder, "--pipeline-parallel-size", "4", *arguments) == 2

    assert message in capsys.readouterr().err


def test_invalid_configuration_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.json").write_text("{")
    for path, message in ((tmp_path / "none.json", "no such file"), (tmp_path, "the folder has no config.json")):
        assert _plan(str(path), "--pipeline-parallel-size", "2") == 2
        assert message in capsys.readouterr().err
    assert _plan(str(tmp_path / "broken.json"), "--pipeline-parallel-size", "2") == 2
    assert "is not JSON" in capsys.readouterr().err
