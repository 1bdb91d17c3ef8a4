"""Parameters without dimensions, such as the scale of CLIP, in checkpoints of all optimizers."""

from pathlib import Path

import pytest
import torch
from torch import nn

from nxdpp import parallel_state
from tests.checkpoint.distributed.layouts import Layout, copy_through, tensors_in, train_and_save
from tests.support.run_ranks import run_ranks

_LAYER = {"transformer_layer_cls": nn.Linear}
PLAIN = Layout(arguments=_LAYER)
DIVIDED = Layout(zero1=True, arguments=_LAYER)
DTYPES = torch.float32, torch.bfloat16


class Scaled(nn.Module):
    """A loss with a scale that has no dimensions."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of ``x``."""
        scaled: torch.Tensor = self.layer(x.to(self.scale.dtype)) * self.scale
        return scaled.float().pow(2).mean()


def _go(rank: int, path: Path, train: Layout, load: Layout) -> None:
    parallel_state.initialize_model_parallel()
    batches = [{"x": torch.arange(32.0).view(8, 4)}] * 2
    for dtype in DTYPES:

        def made(dtype: torch.dtype = dtype) -> nn.Module:
            torch.manual_seed(0)
            return Scaled(dtype)

        folder = path / str(dtype)
        train_and_save(made, batches, train, folder)
        copy_through(made, load, folder, str(train))


@pytest.mark.parametrize(("train", "load"), [(PLAIN, DIVIDED), (DIVIDED, PLAIN)], ids=["plain", "divided"])
def test_its_state_goes_to_another_optimizer(train: Layout, load: Layout, tmp_path: Path) -> None:
    run_ranks(2, _go, tmp_path, train, load)
    for dtype in DTYPES:
        saved, expected = tensors_in(tmp_path / str(dtype) / str(train))
        loaded, found = tensors_in(tmp_path / str(dtype) / str(load))
        states = saved.content["optimizer"]["states"]["scale"]
        assert loaded.content["optimizer"]["states"]["scale"] == states
        assert states["exp_avg"]["number"] != 0.0
        assert ("master" in states) == (dtype == torch.bfloat16)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], values) for name, values in expected.items())
