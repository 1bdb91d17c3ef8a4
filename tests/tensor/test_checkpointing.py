"""Files of each rank: what a layout saves, the same layout loads, without running code."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from nxdpp import NxDPPModel
from nxdpp.ranks import parallel_state
from nxdpp.tensor import checkpointing
from nxdpp.tensor.checkpointing import load, save
from nxdpp.tensor.layers import ColumnParallelLinear, RowParallelLinear
from nxdpp.tensor.rank_files import write_file
from tests.support.run_ranks import run_ranks
from tests.support.tensor_models import VOCABULARY, make


class Mlp(nn.Module):
    """Two divided layers, the first one with two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = ColumnParallelLinear(4, 12, stride=2, gather_output=False)
        self.second = RowParallelLinear(12, 4, input_is_parallel=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(B, 4)`` to ``(B, 4)``."""
        y: torch.Tensor = self.second(self.first(x))
        return y


def _values(module: nn.Module) -> list[torch.Tensor]:
    return [value.detach().clone() for value in module.state_dict().values()]


def _saved_and_loaded(rank: int, path: Path) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model = Mlp()
    optimizer = AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    before = _values(model)
    content = {"epoch": 3, "model": model.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "loss": 0.5}
    save(content, path)
    fresh = Mlp()
    again = AdamW(fresh.parameters(), lr=1.0)
    rest = load(path, model=fresh)
    again.load_state_dict(rest["optimizer_state_dict"])
    everything = load(path)
    load(path, again, model_key="optimizer_state_dict")
    checkpointing.save(content, path / "half", save_serially=False, down_cast_bf16=True, master_dp_only=False)
    half = checkpointing.load(path / "half", master_dp_only=False)
    equal = all(map(torch.equal, before, _values(fresh)))
    state = again.state_dict()["state"][0]["exp_avg"]
    other = None
    try:
        # Only one rank gives what cannot be loaded.
        save({"model": model.state_dict(), "odd": Path if rank == 1 else 0}, path / "refused")
    except ValueError as error:
        other = str(error)
    whole = {name: torch.arange(value.numel() * 2.0).view(shape) for name, value, shape in _whole(model)}
    if rank == 0:
        write_file(path / "whole.pt", whole)
    torch.distributed.barrier()
    load(path / "whole.pt", fresh, sharded=False, model_key=None, strict=False)
    result = {
        "equal": equal,
        "rest": sorted(rest),
        "keys": sorted(everything),
        "lr": again.param_groups[0]["lr"],
        "state": torch.equal(state, optimizer.state_dict()["state"][0]["exp_avg"]),
        "half": {str(value.dtype) for value in half["model"].values()},
        "refused": other,
        "first": fresh.first.weight[:, 0].tolist(),
        "second": fresh.second.weight[0].tolist(),
    }
    parallel_state.destroy_model_parallel()
    return result


def _whole(model: Mlp) -> list[tuple[str, torch.Tensor, tuple[int, int]]]:
    return [("first.weight", model.first.weight, (12, 4)), ("second.weight", model.second.weight, (4, 12))]


def test_each_rank_loads_its_own_file(tmp_path: Path) -> None:
    results = run_ranks(2, _saved_and_loaded, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "half", "tp_rank_00_pp_rank_00", "tp_rank_01_pp_rank_00", "whole.pt",
    ]  # fmt: skip
    assert [file.name for file in (tmp_path / "tp_rank_01_pp_rank_00").iterdir()] == ["checkpoint.pt"]
    assert sorted(file.name for file in (tmp_path / "half").iterdir()) == [
        "tp_rank_00_pp_rank_00_dp_rank_00", "tp_rank_01_pp_rank_00_dp_rank_00",
    ]  # fmt: skip
    for rank, result in enumerate(results):
        assert result["equal"]
        assert result["rest"] == ["epoch", "loss", "optimizer_state_dict"]
        assert result["keys"] == ["epoch", "loss", "model", "optimizer_state_dict"]
        assert result["lr"] == 0.1
        assert result["state"]
        assert result["half"] == {"torch.bfloat16"}
        assert "state_dict['odd'] is a builtins.type" in result["refused"]
        assert ("on rank 1" in result["refused"]) == (rank == 0)
        # Of each of two blocks of six rows of four, the rank's three.
        rows = [3 * rank + row for row in range(3)]
        assert result["first"] == [4.0 * row for row in (*rows, *(6 + row for row in rows))]
        assert result["second"] == [6.0 * rank + column for column in range(6)]


class Runs:
    """Pickled as a call of ``os.mkdir``."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def test_a_load_runs_no_code(tmp_path: Path) -> None:
    folder = tmp_path / "tp_rank_00_pp_rank_00"
    folder.mkdir()
    torch.save({"model": {}, "harm": Runs(tmp_path / "harmed")}, folder / "checkpoint.pt")
    with pytest.raises(ValueError, match="only code can restore, and a load runs none"):
        load(tmp_path)
    assert not (tmp_path / "harmed").exists()


def test_a_value_that_cannot_be_loaded_is_refused_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"state_dict\['run'\]\[1\] is a .*Runs, which only code can restore"):
        save({"model": {"w": torch.ones(2)}, "run": (1, Runs(tmp_path / "harmed"))}, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    save({"args": {"lr": 0.1, "betas": (0.9, 0.95), "name": None, "size": torch.Size([2])}, "step": 3}, tmp_path)
    assert load(tmp_path) == {"args": {"lr": 0.1, "betas": (0.9, 0.95), "name": None, "size": (2,)}, "step": 3}


def test_arguments_without_meaning_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="save_xser=True is the format of torch_xla"):
        save({}, tmp_path, save_xser=True)
    for call in (lambda: save({}, "s3://bucket/run"), lambda: load("s3://bucket/run")):
        with pytest.raises(ValueError, match="'s3://bucket/run' is not on a file system, and would be a folder 's3:'"):
            call()
    save({"model": model.state_dict()}, tmp_path)
    with pytest.raises(ValueError, match="has no key 'weights', but 'model'"):
        load(tmp_path, model, model_key="weights")
    file = tmp_path / "tp_rank_00_pp_rank_00" / "checkpoint.pt"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"is damaged, or not of torch\.save"):
        load(tmp_path, model)


def _pipelined(rank: int, path: Path) -> bool:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model = NxDPPModel(make("llama"), num_microbatches=2)
    ids = torch.arange(16).view(2, 8) % VOCABULARY
    loss = model.run_eval(input_ids=ids, labels=ids)
    save({"model": model.local_state_dict()}, path)
    torch.manual_seed(5)
    other = NxDPPModel(make("llama"), num_microbatches=2)
    with torch.no_grad():
        for parameter in other.local_parameters():
            parameter.zero_()
    load(path, other)
    # The last rank has the loss.
    again = other.run_eval(input_ids=ids, labels=ids)
    parallel_state.destroy_model_parallel()
    return loss is None and again is None if rank == 0 else torch.equal(again, loss)


def test_pipeline_ranks_have_files_of_their_own(tmp_path: Path) -> None:
    assert run_ranks(2, _pipelined, tmp_path) == [True, True]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["tp_rank_00_pp_rank_00", "tp_rank_00_pp_rank_01"]
