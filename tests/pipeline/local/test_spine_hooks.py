"""Hooks of modules that no stage runs: told at construction, and refused where they would be ignored."""

import logging

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from tests.support.models import make, padded_batch
from tests.support.run_ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_rank")

BATCH = padded_batch(4)


def wrapped_llama() -> NxDPPModel:
    return NxDPPModel(make("llama", layers=2), num_microbatches=2)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_full_backward_pre_hook"])
def test_hooks_of_the_spine_that_are_registered_later(register: str) -> None:
    wrapped = wrapped_llama()
    wrapped.run_train(**BATCH)
    handle = getattr(wrapped.original_module.get_submodule("model"), register)(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"hooks of model changed after wrapping.*Call refresh\(\) on every rank"):
        wrapped.run_train(**BATCH)
    with pytest.raises(RuntimeError, match="hooks of model changed"):
        wrapped.run_eval(**BATCH)
    handle.remove()
    wrapped.run_train(**BATCH)


def test_a_hook_that_is_registered_later_runs_after_refresh(caplog: pytest.LogCaptureFixture) -> None:
    wrapped = wrapped_llama()
    before = wrapped.run_eval(**BATCH)
    handle = wrapped.original_module.get_submodule("model").register_forward_hook(
        lambda module, args, output: type(output)(last_hidden_state=output.last_hidden_state * 2)
    )
    wrapped.refresh()
    assert "hooks of model run when a graph is traced" in caplog.text
    assert not torch.equal(wrapped.run_eval(**BATCH), before)
    handle.remove()
    with pytest.raises(RuntimeError, match="hooks of model changed"):
        wrapped.run_eval(**BATCH)
    wrapped.refresh()
    assert torch.equal(wrapped.run_eval(**BATCH), before)


def test_hooks_of_containers() -> None:
    wrapped = wrapped_llama()
    for name in ("", "model", "model.layers"):
        handle = wrapped.local_module.get_submodule(name).register_forward_hook(lambda *_: None)
        with pytest.raises(RuntimeError, match=rf"local_module{name and f'.{name}'} has a hook that would never run"):
            wrapped.run_train(**BATCH)
        handle.remove()
    runs = []
    # The remedy of the message.
    wrapped.get_submodule("model.layers.0").register_forward_hook(lambda *_: runs.append(1))
    wrapped.run_train(**BATCH)
    assert runs == [1, 1]


def test_hooks_of_the_wrapper_are_refused() -> None:
    wrapped = wrapped_llama()
    for register in ("register_forward_pre_hook", "register_full_backward_hook", "register_state_dict_post_hook"):
        with pytest.raises(RuntimeError, match=rf"{register} of a pipelined model: .*local_module.get_submodule"):
            getattr(wrapped, register)(lambda *_: None)


class Both(nn.Module):
    """Two modules with layers, one after the other."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean of the squares of the result for ``x`` ``(rows, 4)``."""
        found: torch.Tensor = self.second(self.first(x)).square().mean()
        return found


def _wrap_twice(rank: int) -> list[str]:
    """Wrap the same modules twice, and run both; return the warnings of hooks."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("nxdpp").addHandler(handler)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    torch.manual_seed(0)
    parts = [nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))) for _ in range(2)]
    for model in [NxDPPModel(Both(*parts), num_microbatches=4, transformer_layer_cls=nn.Linear) for _ in range(2)]:
        model.run_train(x=torch.ones(8, 4))
    before = [each for each in found if "hooks" in each]
    model.original_module.get_submodule("first").register_forward_hook(print)
    model.refresh()
    return before + [each[:14] for each in found if "hooks" in each]


def test_a_second_wrapper_warns_of_the_program_s_hooks_alone() -> None:
    assert run_ranks(2, _wrap_twice) == [["hooks of first"]] * 2
