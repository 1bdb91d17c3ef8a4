"""``python -m nxdpp plan``: table of stages, and errors."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    ASTConfig,
    BeitConfig,
    BertConfig,
    GPT2Config,
    PreTrainedConfig,
    Speech2TextConfig,
    T5Config,
    Wav2Vec2Config,
    WhisperConfig,
    XLNetConfig,
)

from nxdpp.__main__ import main
from nxdpp.planning.text_table import bytes_text
from nxdpp.schedules.actions import ActionKind
from nxdpp.schedules.families.registry import FAMILIES, find_family
from nxdpp.schedules.simulate import Span, simulate
from nxdpp.tracing.costs import count as count_module
from tests.planning.json_keys import keys_in, keys_of
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
    """Cells of the table of ranks: rank or stage, layers, parameters, and so on."""
    table = output.split("\n\n")[1].splitlines()
    lines = [line for line in table[1:] if not line.startswith("---")]
    cells = [re.split(r" {2,}|(?<=[%B]) |(?<=\d) (?=\d)", line.replace("  stage ", "stage-", 1)) for line in lines]
    return [[cell for cell in row if cell] for row in cells]


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _plan(*arguments: str) -> int:
    return main(["plan", *arguments, "--num-microbatches", "4"])


def test_llama_70b_needs_no_memory_for_its_weights(tmp_path: Path) -> None:
    command = ["plan", _write(tmp_path, LLAMA_70B), "--pipeline-parallel-size", "8", "--num-microbatches", "16"]
    ended = subprocess.run(
        [sys.executable, "-c", MEASURE, *command, "--seq-length", "4096", "--partition", "balanced"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )

    assert ended.returncode == 0, ended.stderr
    rows = _rows(ended.stdout)
    assert [row[0] for row in rows] == [*map(str, range(8)), "total"]
    assert sum(int(row[1].split(":")[0]) for row in rows[:-1]) == int(rows[-1][1]) == 80
    assert _number(rows[-1][2]) == sum(_number(row[2]) for row in rows[:-1]) == 70_553_706_496
    assert re.search(r"slowest: rank \d, 1\.0\d\d times the mean work", ended.stdout)
    assert int(ended.stdout.split()[-1]) < 1.5 * 2**20


@pytest.mark.parametrize(
    ("config", "model"),
    [
        (GPT2Config(n_layer=4, n_embd=64, n_head=4), "GPT2LMHeadModel"),
        (BertConfig(num_hidden_layers=4, hidden_size=64, num_attention_heads=4), "BertForMaskedLM"),
        (BertConfig(num_hidden_layers=4, hidden_size=64, num_attention_heads=4, is_decoder=True), "BertLMHeadModel"),
        (BeitConfig(num_hidden_layers=4, hidden_size=64, num_attention_heads=4), "BeitForImageClassification"),
        (ASTConfig(num_hidden_layers=4, hidden_size=64, num_attention_heads=4), "ASTForAudioClassification"),
        (
            Wav2Vec2Config(
                num_hidden_layers=4,
                hidden_size=64,
                num_attention_heads=4,
                conv_dim=(64,) * 7,
                num_conv_pos_embeddings=16,
                num_conv_pos_embedding_groups=4,
                layerdrop=0.0,
            ),
            "Wav2Vec2ForSequenceClassification",
        ),
        (
            WhisperConfig(
                encoder_layers=2,
                decoder_layers=2,
                d_model=64,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                pad_token_id=0,
            ),
            "WhisperForConditionalGeneration",
        ),
        (
            T5(num_layers=2, d_model=64, num_heads=4, d_kv=16, d_ff=64, decoder_start_token_id=0),
            "T5ForConditionalGeneration",
        ),
        # Any number of positions: -1 in its configuration.
        (XLNetConfig(vocab_size=64, d_model=64, n_layer=4, n_head=4, d_inner=64), "XLNetLMHeadModel"),
    ],
)
def test_models_of_six_tasks(
    config: PreTrainedConfig, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.architectures = [model] if model == "BertLMHeadModel" else None
    config.save_pretrained(tmp_path)

    assert _plan(str(tmp_path), "--pipeline-parallel-size", "2") == 0, capsys.readouterr().err

    output = capsys.readouterr().out
    assert output.startswith(f"{model}, ")
    assert f"dtype: float32, as {model}(config) makes it" in output
    assert max(map(len, output.splitlines())) <= 80


def test_configuration_file_and_batch_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _write(tmp_path, LLAMA_70B | {"num_hidden_layers": 3, "architectures": None})

    status = _plan(
        f"{folder}/config.json", "--pipeline-parallel-size", "3", "--batch-size", "8", "--seq-length", "128"
    )  # fmt: skip

    assert status == 0
    assert "step: 4 microbatches of input_ids [2, 128], labels [2, 128]" in capsys.readouterr().out


def test_several_stages_a_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _write(tmp_path, LLAMA_70B | {"num_hidden_layers": 8})

    assert _plan(folder, "--pipeline-parallel-size", "2", "--virtual-pipeline-size", "2", "--seq-length", "64") == 0

    output = capsys.readouterr().out
    rows = _rows(output)
    assert [row[0] for row in rows] == ["0", "stage-0", "stage-2", "1", "stage-1", "stage-3", "total"]
    assert [row[1] for row in rows[1:3]] == ["2: 0..1", "2: 4..5"]
    assert "schedule: interleaved, bubble" in output
    assert output.count("bubble") == 1


@pytest.mark.one_python
def test_layers_are_counted_through_encoder_and_decoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second stage has the last layer of the encoder and the first of the decoder."""
    T5(num_layers=3, d_model=64, num_heads=4, d_kv=16, d_ff=64, decoder_start_token_id=0).save_pretrained(tmp_path)

    assert _plan(str(tmp_path), "--pipeline-parallel-size", "3", "--seq-length", "16") == 0

    output = capsys.readouterr().out
    assert [row[1] for row in _rows(output)] == ["2: 0..1", "2: 2..3", "2: 4..5", "6"]
    assert "\nlayers: 0..2 encoder.block, 3..5 decoder.block\n" in output


@pytest.mark.one_python
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
    search = ["--devices", "2", "--device-memory", "80GB", "--global-batch", "2", "--seq-length", "16", "--best", "1"]
    assert main(["plan", folder, *search, "--data-parallel-size", "2"]) == 0
    assert note in capsys.readouterr().out.replace("\n  ", " ")


@pytest.mark.one_python
def test_no_row_is_wider_than_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole rows at any width of the terminal, and in a pipe; more than 100 stages have the widest cells."""
    folder = _write(tmp_path, LLAMA_70B | {"num_hidden_layers": 104, "hidden_size": 16384})
    monkeypatch.setenv("COLUMNS", "30")
    options = ["--pipeline-parallel-size", "52", "--seq-length", "64", "--schedule", "zb-v", "--details"]

    assert _plan(folder, *options) == 0

    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= 80
    rows = _rows(output)
    assert len(rows) == 52 * 3 + 1
    assert "bubble with stages of equal work: " in output
    assert sum(_number(row[2]) for row in rows if row[0].isdigit()) == _number(rows[-1][2])


@pytest.mark.one_python
@pytest.mark.parametrize("options", [[], ["--schedule", "zb-v"], ["--virtual-pipeline-size", "3"]])
def test_json_has_the_numbers_of_the_table(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _write(tmp_path, LLAMA_70B | {"num_hidden_layers": 8})
    given = [folder, "--pipeline-parallel-size", "2", "--seq-length", "64", *options]
    assert _plan(*given) == 0
    table = _rows(capsys.readouterr().out)
    assert _plan(*given, "--json") == 0
    printed = capsys.readouterr()

    found = json.loads(printed.out)
    ranks = [row for row in table if row[0].isdigit()]
    assert [_number(row[2]) for row in ranks] == [rank["parameters"] for rank in found["ranks"]]
    assert [row[-1] for row in ranks] == [bytes_text(rank["memory_bytes"]) for rank in found["ranks"]]
    assert [row[-2] for row in ranks] == [bytes_text(rank["peak_activation_bytes"]) for rank in found["ranks"]]
    assert found["total"]["memory_bytes"] == sum(rank["memory_bytes"] for rank in found["ranks"])
    assert sum(stage["work_share"] for stage in found["stages"]) == pytest.approx(1)
    assert (found["kind"], found["dtype"], found["dtype_of_configuration"]) == ("layout", "float32", "bfloat16")
    assert keys_of(found) == keys_in(ROOT / "docs" / "partition.md")


SCHEDULES = [
    (["--schedule", "zb-v", "--virtual-pipeline-size", "3"], "--schedule zb-v has 2 stages per rank, not 3: leave"),
    (["--schedule", "1f1b", "--virtual-pipeline-size", "2"], "--schedule 1f1b has 1 stage per rank, not 2: leave"),
    (["--schedule", "interleaved", "--virtual-pipeline-size", "1"], "has several stages per rank, not 1"),
    (["--schedule", "1f2b"], "there is no schedule '1f2b'. Choose one of gpipe, 1f1b,"),
    (["--schedule", "none.csv"], "none.csv: cannot be read as a CSV file"),
    (["--dtype", "int8"], "dtype='int8' is no floating dtype of a model: choose one of float32, bfloat16"),
    (["--json", "--details"], "--json has all figures: leave --details out"),
    (["--batch-size", "6"], "a batch of 6 does not divide into 4 microbatches"),
    (["--memory-limit", "80"], "add --partition balanced"),
    (["--sequence-parallel"], "add --tensor-parallel-size"),
    (
        ["--pipeline-parallel-size", "600000"],
        "600,000 ranks and 4 microbatches make 2,400,000 forwards to simulate, and",
    ),
    (["--device", "h100"], "--device h100: a given layout has no times, so it is for cuda or cpu. Leave it out, or"),
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
    lines = [" ".join([*common, *([] if "--devices" in options else LAYOUT), *options]) for options, _ in SCHEDULES]
    lines += [" ".join(["plan", str(tmp_path / "none"), *LAYOUT]), "plan config.json --hosts 2"]
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], input="\n".join(lines), capture_output=True, text=True, cwd=ROOT
    )

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == ""
    messages = ended.stderr.split("\n2\n")[:-1]
    expected = [message for _, message in SCHEDULES] + ["no such file", "--hosts: for a search"]
    for found, message in zip(messages, expected, strict=True):
        assert message in found
        assert "\n" not in found


@pytest.mark.one_python
def test_a_schedule_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file with the actions of GPipe has its figures. For other numbers the message has the flags that fit."""
    folder = _write(tmp_path, LLAMA_70B | {"num_hidden_layers": 4})
    file = tmp_path / "mine.csv"
    file.write_text("\n".join(",".join(map(str, actions)) for actions in find_family("gpipe").build(2, 4)))
    given = [folder, "--seq-length", "64", "--json"]

    assert (
        main(["plan", *given, "--pipeline-parallel-size", "4", "--num-microbatches", "4", "--schedule", str(file)]) == 2
    )
    message = capsys.readouterr().err
    flags = message[message.index("--pipeline-parallel-size") :].rstrip(".\n").split()
    assert main(["plan", *given, *flags, "--schedule", str(file)]) == 0
    written = json.loads(capsys.readouterr().out)
    assert main(["plan", *given, *flags, "--schedule", "gpipe"]) == 0
    named = json.loads(capsys.readouterr().out)

    assert written["schedule"].pop("name") == str(file)
    assert named["schedule"].pop("name") == "gpipe"
    assert written == named


@pytest.mark.one_python
def test_activations_and_bubble_are_those_of_the_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _write(tmp_path, LLAMA_70B | {"num_hidden_layers": 8})

    def plan(schedule: str) -> dict[str, Any]:
        given = ["--pipeline-parallel-size", "2", "--seq-length", "64", "--schedule", schedule, "--json"]
        assert main(["plan", folder, *given, "--num-microbatches", "8"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    plans = {name: plan(name) for name in FAMILIES}
    for name, family in FAMILIES.items():
        found = plans[name]
        timeline = simulate(family.build(2, 8))
        assert found["schedule"]["bubble_share_of_equal_stages"] == timeline.mean_bubble
        assert found["layout"]["stages"] == 2 * family.default_chunks
        assert [rank["stages"] for rank in found["ranks"]] == [family.placement(2).stages_of(rank) for rank in (0, 1)]
        held = [stage["activation_bytes_of_microbatch"] for stage in found["stages"]]
        for rank, spans in zip(found["ranks"], timeline.spans, strict=True):
            most = max(sum(in_flight) for in_flight in _held(spans, held, found["stages"]))
            assert rank["peak_activation_bytes"] == most, name
    gpipe, one_f_one_b = (plans[name]["ranks"][0]["peak_activation_bytes"] for name in ("gpipe", "1f1b"))
    assert gpipe == 4 * one_f_one_b
    split = plans["zb-h1"]["stages"][1]
    assert 0 < split["kept_bytes_after_input_gradient"] < split["activation_bytes_of_microbatch"]


def _held(spans: list[Span], held: list[int], stages: list[dict[str, Any]]) -> Iterator[list[int]]:
    """Bytes of each microbatch that a rank holds after each of its actions."""
    now: dict[tuple[int, int], int] = {}
    for span in spans:
        stage, kind, microbatch, _ = span.action
        if kind is ActionKind.FORWARD:
            now[stage, microbatch] = held[stage]
        elif kind is ActionKind.INPUT_GRADIENT:
            now[stage, microbatch] = stages[stage]["kept_bytes_after_input_gradient"]
        else:
            del now[stage, microbatch]
        yield list(now.values())


@pytest.mark.one_python
def test_tied_weights_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two stages on one rank hold one copy: the first and the last one of a V."""
    folder = _write(tmp_path, LLAMA_70B | {"num_hidden_layers": 8, "tie_word_embeddings": True})

    def plan(*options: str) -> str:
        assert _plan(folder, "--pipeline-parallel-size", "2", "--seq-length", "64", *options) == 0
        return capsys.readouterr().out

    assert f"{128256 * 8192:,} parameters of the total are copies" in plan().replace("\n  ", " ")
    assert "copies" not in plan("--schedule", "zb-v")


@pytest.mark.one_python
def test_llama_405b_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = llama_3_1_405b()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    options = ["--pipeline-parallel-size", "16", "--num-microbatches", "64", "--partition", "balanced"]
    assert main(["plan", str(tmp_path), *options]) == 0
    assert "LlamaForCausalLM, 405,853,388,800 parameters, on 16 ranks" in capsys.readouterr().out


@pytest.mark.one_python
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


def test_an_interrupt_ends_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nxdpp.planning.command.layout_options", interrupted)

    assert _plan("config.json", "--pipeline-parallel-size", "2") == 130
    printed = capsys.readouterr()
    assert printed.err == "nxdpp plan: interrupted\n"
    assert printed.out == ""


def test_a_memory_limit_counts_communicators_and_messages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """3 communicators of 100 MiB on each of 2 ranks, and a fourth for replicas; the model itself is tiny."""
    tiny = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}
    folder = _write(tmp_path, LLAMA_70B | tiny)

    def plan(limit: float, *arguments: str) -> tuple[int, str]:
        given = ("--pipeline-parallel-size", "2", "--seq-length", "8", "--partition", "balanced", *arguments)
        status = _plan(folder, *given, "--memory-limit", str(limit))
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    status, output = plan(0.25)
    assert status == 2
    assert "0.293 GiB for communicators and messages" in output
    status, output = plan(0.3)
    assert status == 0
    assert "300.0 MiB of communicators and messages (on CUDA)" in output.replace("\n  ", " ")
    assert plan(0.3, "--data-parallel-size", "2")[0] == 2
    assert plan(0.4, "--data-parallel-size", "2")[0] == 0
    status, output = plan(0.25, "--device", "cpu")
    assert status == 0
    assert "communicators" not in output


REFUSED = [
    ({}, ["--pipeline-parallel-size", "81"], "80 transformer layers cannot be split over 81"),
    ({"model_type": "lama"}, [], "model_type is 'lama', which the installed transformers does not know"),
    ({"architectures": ["LlamaModel"]}, [], "architectures names ['LlamaModel']"),
    ({}, ["--seq-length", "200000"], "more than max_position_embeddings=131072"),
    ({"num_attention_heads": 0}, [], "is refused by transformers: ZeroDivisionError"),
    ({"pad_token_id": 200000}, [], "LlamaForCausalLM cannot be built from this configuration"),
    ({"num_hidden_layers": 4}, ["--partition", "balanced", "--memory-limit", "1"], "fits into the limit of 1 GiB"),
]


@pytest.mark.parametrize(("changes", "arguments", "message"), REFUSED)
def test_invalid_options(
    changes: dict[str, Any], arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _write(tmp_path, LLAMA_70B | changes)

    assert _plan(folder, "--pipeline-parallel-size", "4", *arguments) == 2

    assert message in capsys.readouterr().err


@pytest.mark.parametrize("limit", ["nan", "-1", "much"])
def test_a_memory_limit_is_a_size(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _plan("config.json", "--pipeline-parallel-size", "2", "--memory-limit", limit)

    assert "must be a number of GiB above 0" in capsys.readouterr().err


def test_an_unknown_partition(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _plan("config.json", "--pipeline-parallel-size", "2", "--partition", "best")

    assert "invalid choice: 'best'" in capsys.readouterr().err


def test_unsupported_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Speech2TextConfig(encoder_layers=2, decoder_layers=2, d_model=64).save_pretrained(tmp_path)

    assert _plan(str(tmp_path), "--pipeline-parallel-size", "2") == 2

    assert "takes input_features; plans support models of tokens" in capsys.readouterr().err


def test_invalid_configuration_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.json").write_text("{")
    for path, message in ((tmp_path / "none.json", "no such file"), (tmp_path, "the folder has no config.json")):
        assert _plan(str(path), "--pipeline-parallel-size", "2") == 2
        assert message in capsys.readouterr().err
    assert _plan(str(tmp_path / "broken.json"), "--pipeline-parallel-size", "2") == 2
    assert "is not JSON" in capsys.readouterr().err
