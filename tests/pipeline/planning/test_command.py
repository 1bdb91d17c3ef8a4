"""``python -m nxdpp plan``: table of stages, and errors."""

import json
import os
import subprocess
import sys
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
)

from nxdpp.__main__ import main

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


def _plan(*arguments: str) -> int:
    return main(["plan", *arguments, "--num-microbatches", "4"])


def test_llama_70b_needs_no_memory_for_its_weights(tmp_path: Path) -> None:
    command = ["plan", _write(tmp_path, LLAMA_70B), "--pipeline-parallel-size", "8", "--num-microbatches", "16"]
    ended = subprocess.run(
        [sys.executable, "-c", MEASURE, *command, "--seq-length", "4096", "--partition", "balanced"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )

    assert ended.returncode == 0, ended.stderr
    rows = [line.split("│") for line in ended.stdout.splitlines() if line.startswith("│")]
    assert [row[1].strip() for row in rows] == [str(stage) for stage in range(8)]
    assert sum(int(row[2].split(":")[0]) for row in rows) == 80
    assert sum(int(row[3].replace(",", "")) for row in rows) == 70_553_706_496
    assert all("64.00 MiB" in row[-2] for row in rows[:-1])
    assert "slowest stage / mean: 1.0" in ended.stdout
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
    ],
)
def test_models_of_six_tasks(
    config: PreTrainedConfig, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.architectures = [model] if model == "BertLMHeadModel" else None
    config.save_pretrained(tmp_path)

    assert _plan(str(tmp_path), "--pipeline-parallel-size", "2") == 0, capsys.readouterr().err

    output = capsys.readouterr().out
    assert f"{model} in float32, 4 microbatches of" in output
    assert "slowest stage / mean" in output


def test_configuration_file_and_batch_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _write(tmp_path, LLAMA_70B | {"num_hidden_layers": 3, "architectures": None})

    status = _plan(
        f"{folder}/config.json", "--pipeline-parallel-size", "3", "--batch-size", "8", "--seq-length", "128"
    )  # fmt: skip

    assert status == 0
    assert "4 microbatches of input_ids [2, 128], labels [2, 128]" in capsys.readouterr().out


def test_several_stages_a_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _write(tmp_path, LLAMA_70B | {"num_hidden_layers": 8})

    assert _plan(folder, "--pipeline-parallel-size", "2", "--virtual-pipeline-size", "2", "--seq-length", "64") == 0

    output = capsys.readouterr().out
    rows = [line.split("│")[1].strip() for line in output.splitlines() if line.startswith("│")]
    assert rows == ["0 (0)", "1 (1)", "2 (0)", "3 (1)"]
    assert "slowest rank / mean: 1." in output


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
    assert "communicators and messages: 300.01 MiB of each rank, on CUDA" in output
    assert plan(0.3, "--data-parallel-size", "2")[0] == 2
    assert plan(0.4, "--data-parallel-size", "2")[0] == 0
    status, output = plan(0.25, "--device", "cpu")
    assert status == 0
    assert "communicators" not in output


REFUSED = [
    ({}, ["--pipeline-parallel-size", "81"], "80 transformer layers cannot be split over 81"),
    ({"model_type": "lama"}, [], "model_type is 'lama', which the installed transformers does not know"),
    ({"architectures": ["LlamaModel"]}, [], "architectures names ['LlamaModel']"),
    ({}, ["--batch-size", "6"], "a batch of 6 does not divide into 4 microbatches"),
    ({}, ["--seq-length", "200000"], "more than max_position_embeddings=131072"),
    ({}, ["--memory-limit", "80"], "add --partition balanced"),
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
