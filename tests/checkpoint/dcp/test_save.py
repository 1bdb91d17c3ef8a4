"""``save_checkpoint(format="dcp")``: torch.distributed.checkpoint reads it in one process, to the bit."""

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import SGD, AdamW, Optimizer

from nxdpp import parallel_state
from nxdpp.checkpoint.commands.show import verify
from nxdpp.checkpoint.distributed import directory
from nxdpp.doors.nxd.checkpoint import finalize_checkpoint, has_checkpoint, load_checkpoint, save_checkpoint
from nxdpp.gradients.shards.local_tensors import local_rows
from nxdpp.tensor.shards import all_rows
from tests.checkpoint.distributed.layouts import Layout, Training, learning_rates
from tests.support.run_ranks import run_ranks
from tests.support.tensor_models import VOCABULARY, make

LAYOUTS = {
    "stages and shards": Layout(2, shards=2),
    "tensor ranks and shards": Layout(1, 2, shards=2),
}


def _model() -> nn.Module:
    model: nn.Module = make("llama", tie_word_embeddings=True)
    return model


def _batch(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (8, 12), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def one_process(seed: int = 0) -> tuple[nn.Module, AdamW]:
    """The model in one process with the groups of ``Training``, and other values."""
    model = _model()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    parameters = list(model.parameters())
    groups = [
        {"params": [each for each in parameters if each.dim() > 1], "weight_decay": 0.1},
        {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=1e-2)
    # It gives the groups an option of its own.
    learning_rates(optimizer)
    return model, optimizer


def flat(state: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dicts and lists by their paths."""
    if isinstance(state, Mapping):
        items: Any = state.items()
    elif isinstance(state, list) and state and isinstance(state[0], Mapping):
        items = enumerate(state)
    else:
        return {prefix: state}
    return {path: leaf for key, each in items for path, leaf in flat(each, f"{prefix}/{key}").items()}


def check_same(state: Any, expected: Any) -> None:
    """Compare two nested states to the bit."""
    ours, theirs = flat(state), flat(expected)
    assert ours.keys() == theirs.keys()
    for path, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert ours[path].dtype == value.dtype, path
            assert torch.equal(ours[path], value), path
        else:
            assert ours[path] == value, path


def _save(rank: int, path: Path) -> None:
    for name, layout in LAYOUTS.items():
        sizes = (layout.tensor, layout.pipeline)
        parallel_state.initialize_model_parallel(*sizes, data_parallel_shard_size=layout.shards or None)
        training = Training(_model, layout)
        training.step(_batch(0))
        training.step(_batch(1))
        parts = training.model, training.optimizer, training.scheduler
        with CommDebugMode() as collectives:
            save_checkpoint(path / name, "ours", *parts, {"step": 2})
            save_checkpoint(path / name, "dcp", *parts, {"step": 2}, async_save=True, format="dcp")
            assert collectives.get_total_counts() == 0
            all_rows(next(training.model.parameters()))
        assert collectives.get_total_counts() == (layout.shards > 1)
        finalize_checkpoint()
        other = Training(_model, layout)
        content = load_checkpoint(path / name, None, other.model, other.optimizer, other.scheduler)
        assert content == {"step": 2}
        for each in (training, other):
            each.step(_batch(2))
        for ours, theirs in zip(training.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(*(local_rows(each) for each in (ours, theirs)))
        parallel_state.destroy_model_parallel()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each layout a checkpoint of nxdpp, and one that torch.distributed.checkpoint reads too."""
    path: Path = tmp_path_factory.mktemp("dcp")
    run_ranks(4, _save, path)
    return path


@pytest.mark.parametrize("name", LAYOUTS)
def test_torch_reads_it_with_the_names_of_one_process(name: str, checkpoints: Path, tmp_path: Path) -> None:
    folder = checkpoints / name / "dcp"
    expected, optimizer = one_process(1)
    load_checkpoint(checkpoints / name, "ours", expected, optimizer)
    states = dict(zip(("model", "optimizer"), get_state_dict(expected, optimizer), strict=True))

    model, other = one_process(2)
    read: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(model, other), strict=True))
    load(read, checkpoint_id=folder, no_dist=True)
    check_same(read, states)
    set_state_dict(model, other, model_state_dict=read["model"], optim_state_dict=read["optimizer"])
    check_same(other.state_dict(), optimizer.state_dict())

    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    check_same(torch.load(tmp_path / "whole.pt", weights_only=True), states)
    assert verify(folder) == 0


def test_a_save_replaces_and_removes_files_of_torch(tmp_path: Path) -> None:
    model, optimizer = one_process()
    for format in ("dcp", "dcp", "nxdpp", "dcp"):
        save_checkpoint(tmp_path, "same", model, optimizer, format=format)
        suffixes = sorted(file.suffix or file.name for file in (tmp_path / "same").iterdir())
        expected = [".distcp", ".json", ".metadata"] if format == "dcp" else [".json", ".safetensors"]
        assert suffixes == expected
    save_checkpoint(tmp_path, "next", model, optimizer, num_kept_ckpts=1)
    assert not (tmp_path / "same").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_save_that_fails_leaves_the_files_of_torch_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4)
    expected = model.weight.detach().clone()
    save_checkpoint(tmp_path, "same", model, format="dcp")
    files = sorted((tmp_path / "same").iterdir())

    def fail(folder: Path, _: str) -> None:
        assert len(list(folder.glob(".*-.metadata"))) == 1
        raise OSError(errno.EIO, "no")

    with monkeypatch.context() as patched:
        patched.setattr(directory, "put_document", fail)
        nn.init.zeros_(model.weight)
        for tag in ("same", "new"):
            with pytest.raises(OSError, match="rank 0 cannot write"):
                save_checkpoint(tmp_path, tag, model, format="dcp")
    assert not (tmp_path / "new").exists()
    assert sorted((tmp_path / "same").iterdir()) == files
    read = {"model": {"weight": torch.empty(4, 4)}}
    load(read, checkpoint_id=tmp_path / "same", no_dist=True)
    assert torch.equal(read["model"]["weight"], expected)
    # A save that is killed in between has left it.
    hidden = tmp_path / "same" / f".{'0' * 8}-.metadata"
    hidden.touch()
    save_checkpoint(tmp_path, "same", model, format="dcp")
    assert not hidden.exists()


def test_several_optimizers_have_the_state_dict_of_torch(tmp_path: Path) -> None:
    def trained(seed: int) -> tuple[nn.Module, list[Optimizer]]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        groups: list[dict[str, Any]] = [{"params": [model[0].weight]}, {"params": [model[0].bias], "lr": 0.2}]
        optimizers: list[Optimizer] = [SGD(groups, lr=0.1, momentum=0.9), AdamW(model[1].parameters(), lr=0.3)]
        model(torch.ones(2, 3)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        return model, optimizers

    model, optimizers = trained(0)
    save_checkpoint(tmp_path, "ours", model, optimizers, format="dcp")
    expected = get_optimizer_state_dict(model, optimizers)
    found = get_optimizer_state_dict(*trained(1))
    load({"optimizer": found}, checkpoint_id=tmp_path / "ours", no_dist=True)
    check_same(found, expected)
    save({"model": model.state_dict(), "optimizer": expected}, checkpoint_id=tmp_path / "torchs", no_dist=True)
    for tag in ("ours", "torchs"):
        other, theirs = trained(1)
        load_checkpoint(tmp_path, tag, other, theirs)
        check_same(get_optimizer_state_dict(other, theirs), expected)


def test_saves_of_both_in_one_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second, model = (nn.Linear(2, 2) for _ in range(3))
    # torch's directories are checkpoints, and nxdpp does not save into them.
    save({"model": first.state_dict()}, checkpoint_id=tmp_path / "one", no_dist=True)
    assert has_checkpoint(tmp_path)
    load_checkpoint(tmp_path, None, model)
    assert torch.equal(model.weight, first.weight)
    for kind in ("nxdpp", "dcp"):
        with pytest.raises(OSError, match=r"one: torch\.distributed\.checkpoint has saved there, .* another tag"):
            save_checkpoint(tmp_path, "one", model, format=kind)
    # The newest of nxdpp's is loaded, and a later one of torch's is named.
    save_checkpoint(tmp_path, "two", second, format="dcp")
    load_checkpoint(tmp_path, None, model)
    assert torch.equal(model.weight, second.weight)
    save({"model": first.state_dict()}, checkpoint_id=tmp_path / "three", no_dist=True)
    load_checkpoint(tmp_path, None, model)
    assert "torch.distributed.checkpoint wrote three later: give tag='three' to load that" in caplog.text
    # A directory of both is refused: either may be meant.
    save({"model": first.state_dict()}, checkpoint_id=tmp_path / "two", no_dist=True)
    with pytest.raises(ValueError, match=r"remove checkpoint\.json to load torch's, or \.metadata to load nxdpp's"):
        load_checkpoint(tmp_path, "two", model)
    assert verify(tmp_path / "two") == 1
    (tmp_path / "two/checkpoint.json").unlink()
    load_checkpoint(tmp_path, "two", model)
    assert torch.equal(model.weight, first.weight)


def test_damage_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(64, 64)
    save_checkpoint(tmp_path, "one", model, format="dcp")
    (file,) = (tmp_path / "one").glob("*.distcp")
    content = bytearray(file.read_bytes())
    metadata = (tmp_path / "one" / ".metadata").read_bytes()
    (tmp_path / "one" / ".metadata").unlink()
    assert verify(tmp_path / "one") == 1
    assert "is damaged for torch.distributed.checkpoint, and load_checkpoint reads it" in capsys.readouterr().out
    (tmp_path / "one" / ".metadata").write_bytes(metadata)
    assert verify(tmp_path / "one") == 0
    file.write_bytes(content.replace(b"FloatStorage", b"HalfStorage\0"))
    assert verify(tmp_path / "one") == 1
    assert "the piece of model.weight at byte 0 of" in capsys.readouterr().out
    place = content.index(model.weight.detach().numpy().tobytes())
    content[place + 5] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match="have another checksum than when they were written"):
        load_checkpoint(tmp_path, "one", model)
