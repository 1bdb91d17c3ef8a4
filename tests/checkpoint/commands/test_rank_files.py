"""``convert`` to and from the files of NeuronX Distributed's ranks."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from nxdpp import parallel_state, tensor_parallelize
from nxdpp.__main__ import main
from nxdpp.tensor.checkpointing import load, save
from nxdpp.tensor.rank_files import read_file, write_file
from tests.checkpoint.huggingface.checkpointed_models import tensors_in
from tests.support.run_ranks import run_ranks
from tests.support.tensor_models import gpt2, llama, make


def _convert(*arguments: object) -> int:
    return main(["checkpoint", "convert", *map(str, arguments)])


def _rank_file(folder: Path, tensor: int, pipeline: int = 0) -> Path:
    return folder / f"tp_rank_{tensor:02d}_pp_rank_{pipeline:02d}" / "checkpoint.pt"


def _expected(folder: Path, tied: bool = False) -> dict[str, torch.Tensor]:
    """Files of a plain model by ``save_pretrained``, and their tensors."""
    make("llama", tie_word_embeddings=tied).save_pretrained(folder)
    return tensors_in(folder)


def _are_equal(folder: Path, expected: dict[str, torch.Tensor]) -> bool:
    found = tensors_in(folder)
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def _saved_and_loaded(rank: int, folder: Path) -> None:
    """Save the divided models of this rank, and load the files of conversions into others; GPT-2 has fused weights."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    for name in ("llama", "gpt2"):
        model: nn.Module = make(name)
        tensor_parallelize(model)
        save({"model": model.state_dict(), "step": 3}, folder / name / "saved")
        other: nn.Module = make(name)
        tensor_parallelize(other)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        load(folder / name / "written", other)
        assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
    parallel_state.destroy_model_parallel()


def test_files_of_real_ranks_are_converted_and_converted_files_are_loaded(tmp_path: Path) -> None:
    expected = _expected(tmp_path / "llama" / "plain")
    fused = make("gpt2")
    fused.save_pretrained(tmp_path / "gpt2" / "plain")
    two = ("--to", "nxd", "--tensor-parallel-size", 2)
    # Fused weights are divided in blocks when asked: the remedy of the message.
    assert _convert(tmp_path / "gpt2" / "plain", tmp_path / "gpt2" / "written", *two) == 2
    for name, more in (("llama", []), ("gpt2", ["--blocks"])):
        assert _convert(tmp_path / name / "plain", tmp_path / name / "written", *two, *more) == 0
    whole = fused.state_dict()["transformer.h.0.attn.c_attn.weight"]
    part = read_file(_rank_file(tmp_path / "gpt2" / "written", 1))["model"]["transformer.h.0.attn.c_attn.weight"]
    assert torch.equal(part, torch.cat([each.chunk(2, 1)[1] for each in whole.chunk(3, 1)], 1))

    run_ranks(2, _saved_and_loaded, tmp_path)
    for name, more in (("llama", []), ("gpt2", ["--blocks"])):
        folder = tmp_path / name
        back = (folder / "saved", folder / "back", "--to", "huggingface", "--config", folder / "plain")
        if more:
            assert _convert(*back) == 2
        assert _convert(*back, *more) == 0
        assert _are_equal(folder / "back", tensors_in(folder / "plain"))

    of_trainer = tmp_path / "step_3" / "model"
    of_trainer.mkdir(parents=True)
    for rank in range(2):
        state = read_file(_rank_file(tmp_path / "llama" / "saved", rank))["model"]
        torch.save(state, of_trainer / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt")
    config = ("--config", tmp_path / "llama" / "plain")
    assert _convert(tmp_path / "step_3", tmp_path / "out" / "one", "--to", "nxdpp", *config) == 0
    assert _convert(tmp_path / "out", tmp_path / "again", "--to", "huggingface") == 0
    assert _are_equal(tmp_path / "again", expected)


def test_stages_have_files_of_their_own(tmp_path: Path) -> None:
    expected = _expected(tmp_path / "plain", tied=True)
    tensor, pipeline = 2, 2
    ranks = ("--tensor-parallel-size", tensor, "--pipeline-parallel-size", pipeline)
    assert _convert(tmp_path / "plain", tmp_path / "ranks", "--to", "nxd", *ranks) == 0
    assert len(list((tmp_path / "ranks").iterdir())) == tensor * pipeline
    first = read_file(_rank_file(tmp_path / "ranks", 0, 0))["model"]
    assert "model.layers.0.mlp.up_proj.weight" in first
    assert "model.layers.1.mlp.up_proj.weight" not in first
    config = ("--config", tmp_path / "plain")
    assert _convert(tmp_path / "ranks", tmp_path / "whole", "--to", "huggingface", *config) == 0
    assert _are_equal(tmp_path / "whole", expected)


def test_what_files_do_not_tell_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _expected(tmp_path / "plain")
    config = ("--config", tmp_path / "plain")
    two = ("--tensor-parallel-size", 2)
    assert _convert(tmp_path / "plain", tmp_path / "ranks", "--to", "nxd", *two) == 0
    capsys.readouterr()

    def refused(*arguments: object) -> str:
        assert _convert(*arguments) == 2
        assert not (tmp_path / "made").exists()
        return capsys.readouterr().err

    def changed(name: str, values: torch.Tensor) -> str:
        """The refusal of files of which rank 1 has other values."""
        shutil.rmtree(tmp_path / "other", ignore_errors=True)
        shutil.copytree(tmp_path / "ranks", tmp_path / "other")
        content = read_file(_rank_file(tmp_path / "other", 1))
        content["model"][name] = values
        write_file(_rank_file(tmp_path / "other", 1), content)
        return refused(tmp_path / "other", tmp_path / "made", "--to", "nxdpp", *config)

    gpt2().save_pretrained(tmp_path / "gpt2")
    assert "divided in 3 blocks" in refused(tmp_path / "gpt2", tmp_path / "made", "--to", "nxd", *two)
    assert "differs from model.norm.weight" in changed("model.norm.weight", torch.zeros(32))
    assert "not of one shape" in changed("model.norm.weight", torch.zeros(31))
    llama(intermediate_size=40).save_pretrained(tmp_path / "narrow")
    narrow = ("--config", tmp_path / "narrow")
    text = refused(tmp_path / "ranks", tmp_path / "made", "--to", "nxdpp", *narrow)
    assert "copies, padding and other divisions are not known from files" in text
    shutil.rmtree(_rank_file(tmp_path / "ranks", 0).parent)
    assert "lacks the files of tp_rank_00_pp_rank_00" in refused(
        tmp_path / "ranks", tmp_path / "made", "--to", "nxdpp", *config
    )
