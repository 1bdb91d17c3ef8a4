"""Functions around the steps of all optimizers."""

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from nxdpp.gradients.step_hooks import run_after_steps, run_before_steps


def test_a_function_may_end_itself_beside_other_hooks() -> None:
    called = []

    def once(name: str) -> None:
        called.append(name)
        ends[name]()

    ends = {
        "before": run_before_steps(lambda _: once("before")),
        "after": run_after_steps(lambda _: once("after")),
    }
    theirs = [
        register_optimizer_step_pre_hook(lambda *_: called.append("theirs before")),
        register_optimizer_step_post_hook(lambda *_: called.append("theirs after")),
    ]
    try:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        for _ in range(2):
            optimizer.step()
    finally:
        for hook in theirs:
            hook.remove()

    assert called == ["before", "theirs before", "after", "theirs after", "theirs before", "theirs after"]
