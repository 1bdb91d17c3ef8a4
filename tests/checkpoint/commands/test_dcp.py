"""``convert`` to and from directories of torch.distributed.checkpoint, which torch reads and writes here."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from transformers import LlamaForCausalLM

from nxdpp import NxDPPModel, parallel_state
from nxdpp.__main__ import main
from nxdpp.doors.nxd.checkpoint import load_checkpoint, save_checkpoint
from tests.checkpoint.huggingface.checkpointed_models import tensors_in
from tests.support.run_ranks import run_ranks
from tests.support.tensor_models import llama


def _tied() -> LlamaForCausalLM:
    """A Llama with a tied head, uneven parts on two ranks, and bfloat16 but for one norm."""
    torch.manual_seed(3)
    model = llama(tie_word_embeddings=True, vocab_size=63)
    nn.Module.to(model, torch.bfloat16)
    nn.Module.to(model.model.norm, torch.float32)
    return model


def _save(rank: int, folder: Path) -> None:
    """Save two stages with nxdpp, and two shards with torch: nested, and flat as torchtitan does."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    staged = NxDPPModel(_tied(), num_microbatches=2)
    staged.move_model_to_device()
    save_checkpoint(folder / "out", "one", staged)
    sharded: Any = fully_shard(_tied(), mesh=init_device_mesh(parallel_state.local_device().type, (2,)))
    optimizer = AdamW(sharded.parameters(), lr=0.1)
    for parameter in sharded.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model_state, optimizer_state = get_state_dict(sharded, optimizer, options=options)
    progress = {"step": torch.tensor(3), "loader": {"epoch": 1}}
    save({"app": {"model": model_state, "optimizer": optimizer_state, **progress}}, checkpoint_id=folder / "nested")
    save({**model_state, "optimizer": optimizer_state, "train": progress}, checkpoint_id=folder / "flat")
    whole = {name: cast(Any, value).full_tensor().cpu() for name, value in model_state.items()}
    if rank == 0:
        torch.save(whole, folder / "expected.pt")
    parallel_state.destroy_model_parallel()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(2, _save, folder)
    _tied().save_pretrained(folder / "model")
    return folder


@pytest.fixture
def written(saved: Path, tmp_path: Path) -> Path:
    """A directory that ``convert`` writes."""
    assert _checkpoint("convert", saved / "out", tmp_path / "written", "--to", "dcp") == 0
    return tmp_path / "written"


def _checkpoint(*arguments: object) -> int:
    return main(["checkpoint", *map(str, arguments)])


def _are_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == each.dtype and torch.equal(found[name], each) for name, each in expected.items()
    )


def test_torch_reads_what_two_stages_saved_and_so_does_nxdpp(
    written: Path, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    expected = _tied().state_dict()
    assert "lm_head.weight" in expected
    assert not recwarn.list
    state = {name: torch.zeros_like(value) for name, value in expected.items()}
    load(state, checkpoint_id=written, no_dist=True)
    assert _are_equal(state, expected)
    dcp_to_torch_save(written, tmp_path / "whole.pt")
    assert _are_equal(torch.load(tmp_path / "whole.pt"), expected)

    capsys.readouterr()
    assert _checkpoint("show", written, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["format"], shown["all_tensors"]) == ("dcp", len(expected))
    assert shown["tensors"]["model.norm.weight"] == {"dtype": "float32", "shape": [32], "bytes": 128}
    assert _checkpoint("verify", written) == 0
    assert f"{len(expected)} names" in capsys.readouterr().out

    assert _checkpoint("convert", written, tmp_path / "made", "--to", "huggingface") == 0
    assert _are_equal(tensors_in(tmp_path / "made"), tensors_in(saved / "model"))
    assert _checkpoint("convert", written, tmp_path / "again" / "one", "--to", "nxdpp") == 0
    other = _tied()
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    load_checkpoint(tmp_path / "again", "one", other)
    assert _are_equal(other.state_dict(), expected)


@pytest.mark.parametrize("form", ["nested", "flat"])
def test_shards_of_torch_are_read(form: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = torch.load(saved / "expected.pt")
    assert _checkpoint("verify", saved / form) == 0
    assert _checkpoint("show", saved / form) == 0
    assert "entries that are not tensors: " in capsys.readouterr().out
    made = (tmp_path / "made", "--to", "huggingface")
    assert _checkpoint("convert", saved / form, *made) == 2
    assert "has no configuration of a transformers model: give one, --config DIR" in capsys.readouterr().err
    assert _checkpoint("convert", saved / form, *made, "--config", saved / "model") == 0
    assert "entries are not of the model, and are left out: " in capsys.readouterr().out
    found = tensors_in(tmp_path / "made")
    assert found.keys() == tensors_in(saved / "model").keys()
    assert _are_equal(found, {name: expected[name] for name in found})
    assert _checkpoint("convert", saved / form, tmp_path / "out" / "one", "--to", "nxdpp", "--plain") == 0
    assert _checkpoint("convert", tmp_path / "out", tmp_path / "dcp", "--to", "dcp", "--plain") == 0
    state = {name: torch.zeros_like(value) for name, value in expected.items()}
    load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert _are_equal(state, expected)


class _Call:
    """Makes the folder ``path`` when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self._path),)


def test_no_code_of_a_pickle_runs(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = tmp_path / "ran"
    content = (written / ".metadata").read_bytes()
    document = Metadata.__doc__
    on_class = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}S'__doc__'\nS'x'\nstb."
    for pickled in (pickle.dumps(_Call(ran)), pickle.dumps({"a": [_Call(ran)]}, protocol=0), on_class):
        (written / ".metadata").write_bytes(pickled)
        for command in (("show", written), ("convert", written, tmp_path / "made", "--to", "huggingface")):
            assert _checkpoint(*command) == 2
            assert "is not of torch.distributed.checkpoint, or is damaged" in capsys.readouterr().err
        assert _checkpoint("verify", written) == 1
        assert ("mkdir, which is not called" in capsys.readouterr().out) == (pickled != on_class)
    assert Metadata.__doc__ == document

    (written / ".metadata").write_bytes(content)
    metadata = pickle.loads(content)
    info = next(info for index, info in metadata.storage_data.items() if index.fqn == "model.norm.weight")
    torch.save(_Call(ran), written / info.relative_path)
    info.length = (written / info.relative_path).stat().st_size
    (written / ".metadata").write_bytes(pickle.dumps(metadata))
    assert _checkpoint("verify", written) == 1
    assert "the piece of model.norm.weight at byte 0 of" in capsys.readouterr().out
    assert _checkpoint("convert", written, tmp_path / "made", "--to", "huggingface") == 2
    assert "is damaged, or not a tensor" in capsys.readouterr().err
    assert not ran.exists()


def _edited(change: Callable[[Metadata, dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change the metadata; ``change`` also gets the place of each tensor's first piece, by name."""

    def damage(path: Path) -> None:
        metadata = pickle.loads((path / ".metadata").read_bytes())
        places: dict[str, Any] = {}
        for index, info in metadata.storage_data.items():
            places.setdefault(index.fqn, info)
        change(metadata, places)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))

    return damage


def _chunks(metadata: Metadata) -> list[Any]:
    described = metadata.state_dict_metadata["model.norm.weight"]
    assert isinstance(described, TensorStorageMetadata)
    return described.chunks


def _cut(path: Path) -> None:
    file = path / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 1)


_NORM = "model.norm.weight"
_DAMAGES: dict[str, Callable[[Path], object]] = {
    "is unfinished: .metadata of torch.distributed.checkpoint is missing": lambda path: (path / ".metadata").unlink(),
    "__0_0.distcp is missing, and ": lambda path: (path / "__0_0.distcp").unlink(),
    "copy the directory again": _cut,
    "or is damaged (UnpicklingError: pickle data was truncated)": lambda path: os.truncate(path / ".metadata", 99),
    f"the blocks of {_NORM} do not have each": _edited(lambda all, _: _chunks(all).pop()),
    "is in the file '../x'": _edited(lambda _, places: setattr(places[_NORM], "relative_path", "../x")),
    "the files are of different saves": _edited(
        lambda _, places: places[_NORM].__dict__.update(vars(places["model.layers.0.input_layernorm.weight"]))
    ),
    "is damaged, or not a tensor": _edited(lambda _, places: setattr(places[_NORM], "length", 300)),
}


def test_damage_is_named(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, (text, act) in enumerate(_DAMAGES.items()):
        folder = Path(shutil.copytree(written, tmp_path / str(number)))
        act(folder)
        capsys.readouterr()
        assert _checkpoint("verify", folder) == 1
        assert text in capsys.readouterr().out
    assert _checkpoint("convert", folder, tmp_path / "made", "--to", "huggingface") == 2
    assert text in capsys.readouterr().err
