"""Directories that torch.distributed.checkpoint wrote, loaded with the optimizer's state."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard

from nxdpp import parallel_state
from nxdpp.checkpoint.commands.convert import convert
from nxdpp.doors.nxd.checkpoint import has_checkpoint, load_checkpoint, save_checkpoint
from tests.checkpoint.dcp.test_save import check_same
from tests.checkpoint.distributed.layouts import Layout, Training
from tests.support.run_ranks import run_ranks
from tests.support.tensor_models import VOCABULARY, make

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Net(nn.Module):
    """Uneven rows, a tied weight, a buffer and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.rand(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return ``(n, 7)`` for ids ``(n,)``."""
        result: torch.Tensor = self.head(self.norm(self.embedding(ids)) * self.scale)
        return result


def _trained(seed: int, steps: int = 2) -> tuple[Net, optim.AdamW]:
    torch.manual_seed(seed)
    net = Net()
    others = [net.scale, net.norm.weight, net.norm.bias]
    groups: list[dict[str, Any]] = [{"params": [net.embedding.weight]}, {"params": others, "weight_decay": 0.0}]
    optimizer = optim.AdamW(groups, lr=1e-2)
    for _ in range(steps):
        net(torch.arange(7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def _states(net: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True))


def test_a_directory_of_one_process(tmp_path: Path) -> None:
    net, optimizer = _trained(0)
    save({"app": _states(net, optimizer)}, checkpoint_id=tmp_path / "nested", no_dist=True)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(net, optimizer, options=options)
    save({**get_model_state_dict(net), "optim": flat}, checkpoint_id=tmp_path / "flat", no_dist=True)
    for tag in ("nested", "flat"):
        for steps in (0, 3):
            other = _trained(1, steps)
            assert load_checkpoint(tmp_path, tag, *other) is None
            check_same(_states(*other), _states(net, optimizer))
    assert has_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"it is one checkpoint itself. Give its directory and its tag"):
        load_checkpoint(tmp_path / "flat", None, net)


def test_other_entries_are_named(tmp_path: Path) -> None:
    net, optimizer = _trained(0)
    save({**_states(net, optimizer), "lr_scheduler": {"last_epoch": 3}}, checkpoint_id=tmp_path / "one", no_dist=True)
    with pytest.warns(UserWarning, match=r"has lr_scheduler\.last_epoch, of neither model nor optimizer"):
        load_checkpoint(tmp_path, "one", *_trained(1))


def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    net, optimizer = _trained(0)
    states = _states(net, optimizer)
    save(states, checkpoint_id=tmp_path / "one", no_dist=True)
    other, theirs = _trained(1)
    before = _states(other, theirs)
    groups = [{"params": group["params"]} for group in theirs.param_groups]
    with pytest.raises(ValueError, match=r"of the checkpoint has no (momentum|dampening), and the optimizer"):
        load_checkpoint(tmp_path, "one", other, optim.SGD(groups))
    states["model"]["head.weight"] = states["model"]["head.weight"] + 1
    save(states, checkpoint_id=tmp_path / "untied", no_dist=True)
    for strict in (True, False):
        with pytest.raises(ValueError, match=r"head.weight and embedding.weight differ in .*, and are one tensor"):
            load_checkpoint(tmp_path, "untied", other, theirs, strict=strict)
    save({"model": net.state_dict(), "a": optimizer.state_dict()}, checkpoint_id=tmp_path / "numbers", no_dist=True)
    with pytest.raises(ValueError, match=r"has the parameters \[0\], and no names: save what"):
        load_checkpoint(tmp_path, "numbers", other, theirs)
    load_checkpoint(tmp_path, "numbers", _trained(1)[0])
    (file,) = (tmp_path / "one").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="copy the directory again"):
        load_checkpoint(tmp_path, "one", other, theirs)
    check_same(_states(other, theirs), before)


def test_a_conversion_there_and_back_keeps_the_optimizer(tmp_path: Path) -> None:
    net, optimizer = _trained(0)
    save_checkpoint(tmp_path, "ours", net, optimizer)
    convert(tmp_path / "ours", tmp_path / "dcp", "dcp", plain=True, optimizer=True)
    read = _states(*_trained(1))
    load(read, checkpoint_id=tmp_path / "dcp", no_dist=True)
    check_same(read, _states(net, optimizer))
    convert(tmp_path / "dcp", tmp_path / "back", "nxdpp", plain=True, optimizer=True)
    with pytest.raises(ValueError, match="--with-optimizer is for nxdpp to dcp, or back, and not for dcp to hugg"):
        convert(tmp_path / "dcp", tmp_path / "model", "huggingface", plain=True, optimizer=True)
    save_checkpoint(tmp_path, "model", net)
    with pytest.raises(ValueError, match="has no optimizer: leave out --with-optimizer"):
        convert(tmp_path / "model", tmp_path / "none", "dcp", plain=True, optimizer=True)


def _from_fsdp(rank: int, path: Path) -> None:
    parallel_state.initialize_model_parallel()
    model = fully_shard(make("llama"))
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(rank))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    save(_states(model, optimizer), checkpoint_id=path / "theirs")
    parallel_state.destroy_model_parallel()
    for name, layout in {"pipeline": Layout(2), "shards": Layout(shards=2)}.items():
        parallel_state.initialize_model_parallel(1, layout.pipeline)
        training = Training(lambda: make("llama"), layout)
        optimizer = optim.AdamW(training.model.parameters(), lr=1)
        load_checkpoint(path, "theirs", training.model, optimizer)
        save_checkpoint(path, name, training.model, optimizer, format="dcp")
        parallel_state.destroy_model_parallel()


def test_a_training_with_fsdp2_goes_on_in_a_pipeline(tmp_path: Path) -> None:
    run_ranks(2, _from_fsdp, tmp_path)
    read = []
    for tag in ("theirs", "pipeline", "shards"):
        model = make("llama")
        read.append(_states(model, optim.AdamW(model.parameters())))
        load(read[-1], checkpoint_id=tmp_path / tag, no_dist=True)
    assert read[0]["optimizer"]["param_groups"][0]["lr"] == 1e-2
    check_same(read[1], read[0])
    check_same(read[2], read[0])
