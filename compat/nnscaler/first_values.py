"""Values of rank 0 on all ranks: nnScaler keeps those of the module that rank 0 has traced.

::

    rank 0 ─ data group ─▶ its place in each unit ─ pipeline group ─▶ first tensor ranks ─ tensor group ─▶ all
"""

import warnings

import torch
import torch.distributed as dist
from torch import nn

from nxdpp import parallel_state
from nxdpp.nnscaler.digests import digest


def take_first_values(module: nn.Module) -> None:
    """Give all ranks the parameters and buffers of rank 0, in new memory; collective over all ranks.

    Nothing is sent where all ranks have equal values. Tensors on the meta device have no values to compare.

    Raises ``ValueError`` for modules with other names, shapes or dtypes than that of rank 0.
    """
    tensors = _tensors(module)
    kinds = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors]
    everyones = parallel_state.get_exchange().gather((kinds, [digest(tensor) for _, tensor in tensors]))
    for rank, (theirs, _) in enumerate(everyones):
        if theirs != everyones[0][0]:
            pairs = zip([*theirs, "nothing"], [*everyones[0][0], "nothing"], strict=False)
            here, there = next(pair for pair in pairs if pair[0] != pair[1])
            raise ValueError(f"rank {rank} gave another module than rank 0: it has {here}, and rank 0 {there}")
    differ = [index for index in range(len(tensors)) if len({digests[index] for _, digests in everyones}) > 1]
    if not differ:
        return
    warnings.warn(
        f"the ranks gave modules with other values ({tensors[differ[0]][0]} is the first of {len(differ)} tensors): "
        f"all take those of rank 0",
        stacklevel=4,
    )
    for index in differ:
        tensor = tensors[index][1]
        tensor.data = _of_first_rank(tensor.detach().cpu()).to(tensor.device)


def first_random_state() -> torch.Tensor:
    """Return the state of torch's CPU generator on rank 0; collective over all ranks."""
    own = torch.get_rng_state() if dist.get_rank() == 0 else None
    state: torch.Tensor = parallel_state.get_exchange().through_first(own, lambda states: [states[0]] * len(states))
    return state


def _of_first_rank(tensor: torch.Tensor) -> torch.Tensor:
    """Return the value of rank 0, in host memory."""
    # A view of bytes: gloo does not know all dtypes.
    value = tensor.contiguous().clone()
    raw = value.view(-1).view(torch.uint8)
    for group in (
        parallel_state.get_data_parallel_control_group(),
        parallel_state.get_pipeline_control_group(),
        parallel_state.get_tensor_control_group(),
    ):
        if dist.get_world_size(group) > 1:
            dist.broadcast(raw, group=group, group_src=0)
    return value


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return [(name, tensor) for name, tensor in named if not tensor.is_meta]
