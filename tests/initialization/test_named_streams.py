"""Random streams that depend on the seed and a name."""

import torch
from torch import nn

from nxdpp.initialization.named_streams import NamedStreams


def draw(order: list[str], seed: int = 3, **guarded: torch.Tensor) -> dict[str, torch.Tensor]:
    tensors = {name: torch.empty(40) for name in ("a", "b", "c")} | guarded
    with NamedStreams(seed, tensors, list(guarded.values())):
        for name in order:
            tensors[name].normal_()
    return tensors


def test_streams_are_independent_of_other_tensors() -> None:
    everything, less = draw(["a", "b", "c"]), draw(["c", "a"])

    assert torch.equal(everything["a"], less["a"])
    assert torch.equal(everything["c"], less["c"])
    assert not torch.equal(everything["a"], everything["c"])


def test_views_use_the_stream_of_their_parameter() -> None:
    whole, by_rows = nn.Parameter(torch.empty(2, 32)), nn.Parameter(torch.empty(2, 32))

    with torch.no_grad():
        with NamedStreams(0, {"weight": whole}, []):
            whole.data.view(-1)[:32].normal_()
        with NamedStreams(0, {"weight": by_rows}, []):
            by_rows[0].normal_()

    assert torch.equal(whole[0], by_rows[0])


def test_unnamed_tensors_use_the_stream_of_the_module() -> None:
    def draw_for(module: str) -> torch.Tensor:
        with NamedStreams(0, {}, []) as streams:
            streams.begin(module)
            return torch.randn(4)

    assert torch.equal(draw_for("layers.0"), draw_for("layers.0"))
    assert not torch.equal(draw_for("layers.0"), draw_for("layers.1"))


def test_guarded_tensors_do_not_change() -> None:
    guarded = torch.arange(40.0)

    tensors = draw(["guarded", "a"], guarded=guarded)
    with NamedStreams(0, {}, [guarded]):
        guarded.zero_()
        guarded[3:].fill_(1)
        torch.add(guarded, 1, out=guarded)

    assert torch.equal(guarded, torch.arange(40.0))
    assert torch.equal(tensors["a"], draw(["a"])["a"])
