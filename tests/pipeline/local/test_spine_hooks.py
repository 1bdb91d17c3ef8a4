"""Hooks of modules that no stage runs: told at construction, and refused where they would be ignored."""

import pytest
import torch

from nxdpp import NxDPPModel
from tests.support.models import make, padded_batch

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
