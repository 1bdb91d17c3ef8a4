"""Initial-values sweep: initial weights are those of the constructor, for any partition.

Each type is built on the meta device and wrapped as each rank of pipelines of 1, 2 and 4. The weights that
``materialise`` gives are compared bit for bit. The same is done with ``deferred_init``, compared with the eager
constructor. A type is

- exact, WRONG or refused (with the message);
- left: its ``_init_weights`` leaves parameters without values, an error on the meta device. Only ``deferred_init`` is
  compared.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from nxdpp import NxDPPModel, deferred_init, parallel_state
from nxdpp.tracing.graph.errors import TracingError
from tools.zoo import ARGUMENTS, build
from tools.zoo.sweep import Verdict

SIZES = (1, 2, 4)
Values = dict[str, torch.Tensor]


def judge(task: str, model_type: str, sizes: Sequence[int] = SIZES) -> Verdict:
    """Compare the initial weights of one type on pipelines of these sizes."""
    given: dict[str, Any] = dict(ARGUMENTS.get(model_type, {}))
    eager = build(task, model_type)
    expected: Values = dict(eager.named_parameters(remove_duplicate=False))
    expected |= dict(eager.named_buffers(remove_duplicate=False))

    def deferred() -> Any:
        # Same seed as ``build``.
        torch.manual_seed(0)
        return deferred_init(type(eager), eager.config).train()

    try:
        differing = [f"deferred: {name}" for name in differences(deferred, given, expected, sizes)]
    except (TracingError, ValueError) as error:
        return Verdict("refused", f"{type(error).__name__}: {error}")

    def on_meta() -> Any:
        torch.manual_seed(0)
        return build(task, model_type, "meta")

    try:
        whole = local_values(on_meta, given, 0, 1)
    except RuntimeError as error:
        if "left without values" not in str(error):
            raise
        return Verdict("WRONG", ", ".join(differing)) if differing else Verdict("left", str(error).splitlines()[1])
    differing += [f"meta: {name}" for name in differences(on_meta, given, whole, sizes)]
    return Verdict("WRONG", f"{len(differing)} tensors: {', '.join(differing)}") if differing else Verdict("exact")


def differences(make: Callable[[], Any], given: dict[str, Any], expected: Values, sizes: Sequence[int]) -> list[str]:
    """Names of tensors that differ on a rank of a pipeline, and of tensors that no rank has."""
    differing: set[str] = set()
    for ranks in sizes:
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
