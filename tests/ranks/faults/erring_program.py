"""Program of ``test_one_name``: an error that starts on one rank, ``erring_program.py CASE RANK FOLDER``.

The rank unwinds slowly, so that another rank that is told of the error ends first, if it does not wait.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import nxdpp
from nxdpp import NxDPPModel, parallel_state
from nxdpp.checkpoint.distributed import directory

CASE, RANK, FOLDER = sys.argv[1], int(sys.argv[2]), sys.argv[3]


class Layer(nn.Linear):
    """A layer of the model."""


class Model(nn.Module):
    """A model of four layers, which views a slice of its targets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        for layer in self.layers:
            x = layer(x)
        targets = targets[:, : x.shape[1]]
        return {"loss": (x.reshape(-1) - targets.view(-1)).square().mean()}


class Scheduler:
    """A scheduler that fails on the erring rank."""

    def state_dict(self) -> dict[str, Any]:
        """Return no state."""
        _fail_in("save")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take no state."""
        _fail_in("load")


def _fail_in(*cases: str) -> None:
    if CASE in cases and dist.get_rank() == RANK:
        raise KeyError("the first error")


def main() -> None:
    """Wrap a model, save, load, evaluate and train."""
    put_document = directory.put_document

    def put_or_fail(folder: Path, name: str) -> None:
        _fail_in("finish of a save")
        put_document(folder, name)

    vars(directory)["put_document"] = put_or_fail
    model = NxDPPModel(
        Model(),
        transformer_layer_cls=Layer,
        num_microbatches=2,
        post_partition_hooks=[lambda model: _fail_in("construction")],
    )
    if CASE != "viewed in training":
        nxdpp.save_checkpoint(FOLDER, "a", model, scheduler=Scheduler())
        nxdpp.load_checkpoint(FOLDER, "a", model, scheduler=Scheduler())
    for number in range(2):
        if number == 1:
            _fail_in("evaluation")
        model.run_eval(x=torch.ones(8, 8), targets=torch.ones(8, 8))
    # A slice of wider targets has no view as one dimension.
    model.run_train(x=torch.ones(8, 8), targets=torch.ones(8, 9))


if __name__ == "__main__":
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, backend="gloo")
    try:
        main()
    except Exception:
        if dist.get_rank() != RANK:
            raise
        time.sleep(1.0)
        raise
