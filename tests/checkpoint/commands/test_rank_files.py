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


def _saved_and_loaded(rank: int, saved: Path, written: Path) -> bool:
    """Save the divided model of this rank, and load the file of a conversion into another one."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model: nn.Module = make("llama")
    tensor_parallelize(model)
    save({"model": model.state_dict(), "step": 3}, saved)
    other: nn.Module = make("llama")
    tensor_parallelize(other)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    load(written, other)
    parallel_state.destroy_model_parallel()
    return all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


def _fused(rank: int, written: Path, saved: Path) -> bool:
    """Load the fused weights of a conversion into the divided model of this rank, and save them."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model: nn.Module = make("gpt2")
    tensor_parallelize(model)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load(written, model)
    save({"model": model.state_dict()}, saved)
    parallel_state.destroy_model_parallel()
    found = model.state_dict()
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_fused_weights_are_divided_in_blocks_when_asked(tmp_path: Path) -> None:
    model = make("gpt2")
    model.save_pretrained(tmp_path / "plain")
    two = ("--to", "nxd", "--tensor-parallel-size", 2)
    assert _convert(tmp_path / "plain", tmp_path / "one", *two) == 2
    # The remedy of the message.
    assert _convert(tmp_path / "plain", tmp_path / "written", *two, "--blocks") == 0
    whole = model.state_dict()["transformer.h.0.attn.c_attn.weight"]
    query, key, value = whole.chunk(3, 1)
    part = read_file(_rank_file(tmp_path / "written", 1))["model"]["transformer.h.0.attn.c_attn.weight"]
    assert torch.equal(part, torch.cat([each.chunk(2, 1)[1] for each in (query, key, value)], 1))
    assert run_ranks(2, _fused, tmp_path / "written", tmp_path / "saved") == [True, True]
    back = (tmp_path / "saved", tmp_path / "back", "--to", "huggingface", "--config", tmp_path / "plain")
    assert _convert(*back) == 2
    assert _convert(*back, "--blocks") == 0
    assert _are_equal(tmp_path / "back", tensors_in(tmp_path / "plain"))


def test_files_of_real_ranks_are_converted_and_converted_files_are_loaded(tmp_path: Path) -> None:
    expected = _expected(tmp_path / "plain")
    assert _convert(tmp_path / "plain", tmp_path / "written", "--to", "nxd", "--tensor-parallel-size", 2) == 0
    assert run_ranks(2, _saved_and_loaded, tmp_path / "saved", tmp_path / "written") == [True, True]
    config = ("--config", tmp_path / "plain")
    assert _convert(tmp_path / "saved", tmp_path / "whole", "--to", "huggingface", *config) == 0
    assert _are_equal(tmp_path / "whole", expected)

    of_trainer = tmp_path / "step_3" / "model"
    of_trainer.mkdir(parents=True)
    for rank in range(2):
        state = read_file(_rank_file(tmp_path / "saved", rank))["model"]
        torch.save(state, of_trainer / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt")
    assert _convert(tmp_path / "step_3", tmp_path / "out" / "one", "--to", "nxdpp", *config) == 0
    assert _convert(tmp_path / "out", tmp_path / "again", "--to", "huggingface") == 0
    assert _are_equal(tmp_path / "again", expected)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sizes", [(1, 2), (2, 2)])
def test_stages_have_files_of_their_own(sizes: tuple[int, int], tied: bool, tmp_path: Path) -> None:
    expected = _expected(tmp_path / "plain", tied)
    tensor, pipeline = sizes
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
    assert "--blocks is for files of ranks" in refused(
        tmp_path / "gpt2", tmp_path / "made", "--to", "nxdpp", "--blocks"
    )
    assert "differs from model.norm.weight" in changed("model.norm.weight", torch.zeros(32))
    assert "not of one shape" in changed("model.norm.weight", torch.zeros(31))
    assert "1 are unexpected" not in refused(tmp_path / "ranks", tmp_path / "made", "--to", "nxdpp")
    assert "numbers of ranks are for --to nxd" in refused(tmp_path / "ranks", tmp_path / "made", "--to", "nxdpp", *two)
    assert "has files of ranks already" in refused(tmp_path / "plain", tmp_path / "ranks", "--to", "nxd", *two)
    llama(intermediate_size=40).save_pretrained(tmp_path / "narrow")
    narrow = ("--config", tmp_path / "narrow")
    text = refused(tmp_path / "ranks", tmp_path / "made", "--to", "nxdpp", *narrow)
    assert "copies, padding and other divisions are not known from files" in text
    shutil.rmtree(_rank_file(tmp_path / "ranks", 0).parent)
    assert "lacks the files of tp_rank_00_pp_rank_00" in refused(
        tmp_path / "ranks", tmp_path / "made", "--to", "nxdpp", *config
    )
