"""``python -m nxdpp checkpoint convert``: to a Hugging Face directory and from one, without the model in memory."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from nxdpp import NxDPPModel, parallel_state, tensor_parallelize
from nxdpp.__main__ import main
from nxdpp.checkpoint.distributed import captured
from nxdpp.doors.nxd.checkpoint import load_checkpoint, save_checkpoint
from tests.checkpoint.distributed.layouts import Layout, train_and_save
from tests.checkpoint.distributed.layouts import tensors_in as distributed_tensors
from tests.checkpoint.huggingface.checkpointed_models import tensors_in
from tests.support.process_memory import peak_bytes, reset_peak, resident_bytes
from tests.support.run_ranks import run_ranks
from tests.support.tensor_models import llama, make, t5


def _mixtral() -> MixtralForCausalLM:
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    return MixtralForCausalLM(config)


def _tied() -> LlamaForCausalLM:
    return llama(tie_word_embeddings=True)


MODELS = {"tied": _tied, "mixtral": _mixtral, "t5": t5}


def _convert(*arguments: object) -> int:
    return main(["checkpoint", "convert", *map(str, arguments)])


def _configuration(folder: Path) -> dict[str, object]:
    return {file.name: json.loads(file.read_text()) for file in folder.glob("*config.json")}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_conversion_gives_what_save_pretrained_writes(make: Callable[[], PreTrainedModel], tmp_path: Path) -> None:
    model = make()
    save_checkpoint(tmp_path / "out", "one", model)
    model.save_pretrained(tmp_path / "expected")
    expected = tensors_in(tmp_path / "expected")

    assert _convert(tmp_path / "out", tmp_path / "made", "--to", "huggingface") == 0
    assert _convert(tmp_path / "expected", tmp_path / "out" / "again", "--to", "nxdpp") == 0
    assert _convert(tmp_path / "out" / "again", tmp_path / "twice", "--to", "huggingface") == 0
    for folder in (tmp_path / "made", tmp_path / "twice"):
        found = tensors_in(folder)
        assert set(found) == set(expected)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert {value.dtype for value in found.values()} == {value.dtype for value in expected.values()}
        assert _configuration(folder) == _configuration(tmp_path / "expected")

    other = make()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    load_checkpoint(tmp_path / "out", "again", other)
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


class _Tied(nn.Module):
    """A module that is not of transformers: a tied weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


def test_a_module_of_ones_own_keeps_its_names(tmp_path: Path) -> None:
    model = _Tied()
    save_checkpoint(tmp_path / "out", "one", model)
    assert _convert(tmp_path / "out", tmp_path / "made", "--to", "huggingface", "--plain") == 0
    found = tensors_in(tmp_path / "made")
    expected = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert [file.name for file in (tmp_path / "made").iterdir()] == ["model.safetensors"]
    body = {name.removeprefix("body."): value for name, value in expected.items() if name.startswith("body.")}
    save_file(body, tmp_path / "model.safetensors")
    assert _convert(tmp_path, tmp_path / "again" / "one", "--to", "nxdpp", "--plain") == 0
    other = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    load_checkpoint(tmp_path / "again", "one", other)
    assert all(map(torch.equal, model.body.state_dict().values(), other.state_dict().values()))


def test_files_have_at_most_the_size_asked_for(tmp_path: Path) -> None:
    """Several files are a source too."""
    model, again = _tied(), _tied()
    save_checkpoint(tmp_path / "out", "one", model)
    made = (tmp_path / "out", tmp_path / "made", "--to", "huggingface", "--max-shard-size", "20KB")
    assert _convert(*made) == 0
    files = list((tmp_path / "made").glob("*.safetensors"))
    assert len(files) > 2
    assert all(sum(value.nbytes for value in load_file(file).values()) <= 20_000 for file in files)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "made")
    assert _convert(tmp_path / "made", tmp_path / "back" / "one", "--to", "nxdpp") == 0
    load_checkpoint(tmp_path / "back", "one", again)
    for each in (theirs, again):
        assert all(map(torch.equal, model.state_dict().values(), each.state_dict().values()))


def test_what_does_not_fit_is_refused_before_a_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "made"
    save_checkpoint(tmp_path / "out", "one", llama())
    save_checkpoint(tmp_path / "own", "one", _Tied())
    adapted: Any = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"]))
    save_checkpoint(tmp_path / "adapted", "one", adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    llama(num_hidden_layers=3).save_pretrained(tmp_path / "other")
    llama(intermediate_size=64).save_pretrained(tmp_path / "wide")
    with monkeypatch.context() as patch:
        patch.setattr(captured, "configuration_of", lambda model: None)
        save_checkpoint(tmp_path / "nameless", "one", llama())
    llama().save_pretrained(tmp_path / "fp8")
    file = tmp_path / "fp8" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    _tied().save_pretrained(tmp_path / "untied")
    tensors = load_file(tmp_path / "untied" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, tmp_path / "untied" / "model.safetensors", {"format": "pt"})
    cases: list[tuple[str, str, list[object], str]] = [
        ("out", "huggingface", ["--config", tmp_path / "other"], "9 are missing"),
        ("out", "huggingface", ["--config", tmp_path / "wide"], "is of shape [48, 32] in"),
        ("own", "huggingface", [], "is not of transformers, give --plain"),
        ("nameless", "huggingface", [], "has no configuration of a transformers model: give one, --config DIR"),
        ("adapted", "huggingface", ["--plain"], "load it with nxdpp.load_checkpoint into the PeftModel"),
        ("adapter", "nxdpp", [], "holds an adapter"),
        ("fp8", "nxdpp", [], "dequantize=True), and save that model"),
        ("untied", "nxdpp", [], "are one tied weight in this LlamaForCausalLM, but two different tensors"),
    ]
    for source, to, more, text in cases:
        assert _convert(tmp_path / source, made, "--to", to, *more) == 2
        assert text in capsys.readouterr().err
        assert not made.exists()
    assert _convert(tmp_path / "out", tmp_path / "wide", "--to", "huggingface") == 2
    assert "has model.safetensors, config.json already" in capsys.readouterr().err
    # The remedy for a checkpoint without configuration.
    llama().save_pretrained(tmp_path / "model")
    assert _convert(tmp_path / "nameless", made, "--to", "huggingface", "--config", tmp_path / "model") == 0


def _of_ranks(rank: int, path: Path) -> None:
    """Save from stages of two ranks; load the conversion ``one`` in two layouts, and save what was loaded."""
    parallel_state.initialize_model_parallel(1, 2)
    one = [{"input_ids": torch.arange(16).view(2, 8), "labels": torch.arange(16).view(2, 8)}]
    train_and_save(partial(make, "llama"), one, Layout(2), path / "stages")
    parallel_state.destroy_model_parallel()
    for layout in (Layout(2, 1), Layout(1, 2)):
        parallel_state.initialize_model_parallel(layout.tensor, layout.pipeline)
        with torch.device("meta" if layout.tensor > 1 else "cpu"):
            module: Any = tensor_parallelize(_tied()) if layout.tensor > 1 else _tied()
        model = NxDPPModel(module, num_microbatches=2)
        load_checkpoint(path, "one", model)
        model.move_model_to_device()
        save_checkpoint(path, str(layout), model)
        parallel_state.destroy_model_parallel()


def test_a_training_of_ranks_is_converted_whole_and_starts_from_a_conversion(tmp_path: Path) -> None:
    _tied().save_pretrained(tmp_path / "model")
    assert _convert(tmp_path / "model", tmp_path / "out" / "one", "--to", "nxdpp") == 0
    run_ranks(2, _of_ranks, tmp_path / "out")
    expected = tensors_in(tmp_path / "model")
    for layout in (Layout(2, 1), Layout(1, 2)):
        _, found = distributed_tensors(tmp_path / "out" / str(layout))
        assert found.keys() == {f"model.{name}" for name in expected}
        assert all(torch.equal(found[f"model.{name}"], value) for name, value in expected.items())
    stages = tmp_path / "out" / "stages"
    assert _convert(stages, tmp_path / "made", "--to", "huggingface") == 0
    assert main(["checkpoint", "verify", str(stages)]) == 0
    converted = tensors_in(tmp_path / "made")
    _, saved = distributed_tensors(stages / str(Layout(2)))
    assert converted.keys() == LlamaForCausalLM.from_pretrained(tmp_path / "made").state_dict().keys()
    assert all(torch.equal(values, saved[f"model.{name}"]) for name, values in converted.items())


def _large() -> LlamaForCausalLM:
    """A Llama of 68 million parameters, 274 MB in float32; the largest tensor has 12 MB."""
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=5, num_attention_heads=8, vocab_size=2048
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return model.to_empty(device="cpu")


def _write_large(_: int, folder: Path) -> None:
    model = _large()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.5)
    save_checkpoint(folder, "one", model)


def _convert_measured(_: int, warm: Path, large: Path) -> list[int]:
    """Peak bytes of conversions, each from the result of an earlier one. ``warm`` is a small one for the imports."""
    peaks = []
    for source, destination, to, ranks in (
        ("one", "made", "huggingface", 1),
        ("made", "ranks", "nxd", 2),
        ("ranks", "last", "nxdpp", 1),
    ):
        for folder in (warm, large):
            more = ["--tensor-parallel-size", ranks, *(["--config", folder / "made"] if source == "ranks" else [])]
            reset_peak()
            before = resident_bytes()
            assert _convert(folder / source, folder / destination, "--to", to, *more) == 0
        peaks.append(peak_bytes() - before)
    return peaks


def test_a_conversion_needs_the_memory_of_its_largest_tensor(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "small", "one", llama())
    run_ranks(1, _write_large, tmp_path / "large")
    (peaks,) = run_ranks(1, _convert_measured, tmp_path / "small", tmp_path / "large")
    largest = 2816 * 1024 * 4
    assert max(peaks) < largest + 100 * 2**20 < 270_000_000 / 2
    _, values = distributed_tensors(tmp_path / "large" / "last")
    assert len(values) == 48
    assert all(bool((value == 1.5).all()) for value in values.values())
    shutil.rmtree(tmp_path / "large")
