"""First values of every transformer type: the same for any partition, and as the constructor makes them.

    python -m tests.zoo.initial_values [TASK ...] [--jobs 2] [--type TYPE]

For each type that ``tests.zoo.training`` has, a model is built on the meta device and wrapped as each rank of 1, 2
and 4, and what ``materialise`` gives them is compared bit for bit. Then the same with ``deferred_init``, compared with
the eager constructor. A type is exact, WRONG, refused (with what message), or left: its ``_init_weights`` leaves
parameters without values, which is an error for a model on the meta device, and ``deferred_init`` alone is compared.
The exit status is 1 where one is wrong.
"""

from collections.abc import Callable
from typing import Any

import torch

from nxdpp import NxDPPModel, deferred_init, parallel_state
from nxdpp.tracing.errors import TracingError
from tests.zoo import ARGUMENTS, build
from tests.zoo.command import judge_every_type

SIZES = (1, 2, 4)
Values = dict[str, torch.Tensor]


def main() -> None:
    """Print one line a type, and a summary of each task."""
    judge_every_type(judge, __doc__ or "")


def judge(task: str, model_type: str) -> tuple[str, str]:
    """What kind of result a type has, and why in words."""
    given: dict[str, Any] = dict(ARGUMENTS.get(model_type, {}))
    eager = build(task, model_type)
    expected: Values = dict(eager.named_parameters(remove_duplicate=False))
    expected |= dict(eager.named_buffers(remove_duplicate=False))

    def deferred() -> Any:
        # As zoo_models.build has it.
        torch.manual_seed(0)
        return deferred_init(type(eager), eager.config).train()

    try:
        differing = [f"deferred: {name}" for name in differences(deferred, given, expected)]
    except (TracingError, ValueError) as error:
        return "refused", f"{type(error).__name__}: {error}"

    def on_meta() -> Any:
        torch.manual_seed(0)
        return build(task, model_type, "meta")

    try:
        whole = local_values(on_meta, given, 0, 1)
    except RuntimeError as error:
        if "left without values" not in str(error):
            raise
        return ("WRONG", ", ".join(differing)) if differing else ("left", str(error).splitlines()[1].strip())
    differing += [f"meta: {name}" for name in differences(on_meta, given, whole)]
    return ("WRONG", f"{len(differing)} tensors: {', '.join(differing)}") if differing else ("exact", "")


def differences(make: Callable[[], Any], given: dict[str, Any], expected: Values) -> list[str]:
    """Names of what any rank of any pipeline has otherwise, and of what no rank has."""
    differing: set[str] = set()
    for ranks in SIZES:
        left = set(expected)
        for rank in range(ranks):
            values = local_values(make, given, rank, ranks)
            differing |= {name for name, value in values.items() if not torch.equal(value, expected[name])}
            left -= set(values)
        differing |= left
    return sorted(differing)


def local_values(make: Callable[[], Any], given: dict[str, Any], rank: int, ranks: int) -> Values:
    """Parameters and buffers of one rank, in this process."""
    parallel_state.initialize_debug(pipeline_model_parallel_rank=rank, pipeline_model_parallel_size=ranks)
    try:
        model = NxDPPModel(make(), num_microbatches=2, **given)
        model.materialise()
        values: Values = dict(model.local_named_parameters(remove_duplicate=False))
        return values | dict(model.local_named_buffers(remove_duplicate=False))
    finally:
        parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    main()
