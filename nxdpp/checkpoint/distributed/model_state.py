"""Parameters and persistent buffers of a model by original names and global shapes."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nxdpp.agreement.same_values import sample
from nxdpp.checkpoint.huggingface.model_tensors import WrappedModel, check_still_tied, tied_names_of, unwrapped_name
from nxdpp.gradients.shards.local_tensors import is_sharded
from nxdpp.ground.torch_names import NON_PERSISTENT
from nxdpp.pipeline.local.elsewhere_tensors import is_frozen_of_torchao
from nxdpp.pipeline.local.own_save import state_of_all_names
from nxdpp.tensor.shards import is_divided_by_rows


class ModelTensors(NamedTuple):
    """The tensors of a model that this rank has, by name; a tied one only under its first name in the whole model.

    ``ties`` has the other names of tied tensors of the whole model, with their first name; equal on all ranks.
    ``quantized`` has a hash of a sample of each frozen quantized weight of this rank, which ``tensors`` leaves out.
    """

    tensors: dict[str, torch.Tensor]
    ties: dict[str, str]
    quantized: dict[str, str]

    def names(self) -> dict[int, str]:
        """The name of each tensor by its ``id``."""
        return {id(tensor): name for name, tensor in self.tensors.items()}


def model_tensors(model: nn.Module) -> ModelTensors:
    """Return the tensors of ``model``: a pipelined one, of which a rank has a part, or a module of one process.

    A module in ``DistributedDataParallel`` or ``torch.compile`` has the names of the module itself.

    Raises ``ValueError`` for state other than dense parameters and buffers, for a state dict that omits some, and for
    a tie that was undone.
    """
    state, quantized = _state_of(local_module_of(model))
    groups = tied_names_of(cast(WrappedModel, model)) if is_pipelined(model) else tied_in(state)
    check_still_tied(state, groups)
    ties = {name: names[0] for names in groups for name in names[1:]}
    return ModelTensors({ties.get(name, name): tensor for name, tensor in state.items()}, ties, quantized)


def is_pipelined(model: nn.Module) -> bool:
    """Return whether ``model`` is a pipelined one, of which this rank has a part."""
    return isinstance(getattr(model, "local_module", None), nn.Module) and hasattr(model, "tied_names")


def local_module_of(model: nn.Module) -> nn.Module:
    """The module that has the tensors of ``model`` on this rank."""
    if is_pipelined(model):
        return cast(WrappedModel, model).local_module
    return cast(nn.Module, model.module) if isinstance(model, DistributedDataParallel) else model


def names_of(model: nn.Module) -> list[str]:
    """All names of the whole model, in its order."""
    module = cast(WrappedModel, model).original_module if is_pipelined(model) else local_module_of(model)
    return [unwrapped_name(name) for name in state_of_all_names(module)]


def _quantised(state: Mapping[str, Any]) -> list[str]:
    """Names of the frozen weights of bitsandbytes in 4 bits and of torchao, and of all that is written of their form.

    They never change, and bitsandbytes' kernels for the CPU arrange them anew in an evaluation: they stay out of
    checkpoints, and a load finds them in the model, as adapters find their base. One of bitsandbytes that has values
    but no state is not quantised yet.

    Raises ``ValueError`` for one on the meta device.
    """
    frozen = {
        name: value
        for name, value in state.items()
        if is_frozen_of_torchao(value) or (hasattr(value, "quant_state") and not value.requires_grad)
    }
    for name, value in frozen.items():
        if value.is_meta:
            raise ValueError(
                f"{name} is a quantized weight on the meta device, and a checkpoint has no values for it: load the "
                f"model with from_pretrained."
            )
    weights = [name for name, value in frozen.items() if getattr(value, "quant_state", value) is not None]
    starts = tuple(f"{name}." for name in weights)
    return [name for name in state if name in weights or (starts and name.startswith(starts))]


def _state_of(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The parameters and persistent buffers of ``module`` by name, a tied one under each of its names; and hashes."""
    state = module.state_dict(keep_vars=True)
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    left_out = {name: state.pop(name) for name in _quantised(state)}
    for name, value in state.items():
        if id(value) not in own:
            raise ValueError(
                f"{name} of the model's state dict is no parameter or buffer: a load could not give it back. Keep it "
                f"in a buffer (register_buffer), or in user_content and out of the state dict."
            )
        if is_sharded(value) and not is_divided_by_rows(value):
            raise ValueError(
                f"{name} is a DTensor of {list(value.placements)}, and a checkpoint holds shards of rows: use "
                f"fully_shard, which has [Shard(0)], or [Replicate(), Shard(0)]."
            )
        is_wrapped = not is_sharded(value) and hasattr(value, "__tensor_flatten__")
        if value.layout != torch.strided or is_wrapped:
            raise ValueError(
                f"{name} is a {type(value).__name__} of layout {value.layout}, and a checkpoint holds dense tensors."
            )
    kept = {*map(id, state.values()), *map(id, left_out.values())}
    left = [name for name, tensor in _persistent(module) if id(tensor) not in kept]
    if left:
        raise ValueError(
            f"the model's state dict leaves out {left[0]}, which a load could not give back: remove the hook or the "
            f"method that leaves it out, or register it with persistent=False."
        )
    unwrapped = {unwrapped_name(name): tensor for name, tensor in state.items()}
    if len(unwrapped) < len(state):
        names = Counter(map(unwrapped_name, state))
        raise ValueError(
            f"the model has {max(names, key=names.__getitem__)} twice, in a wrapper of torch and beside it: give the "
            f"module in the wrapper another name than _orig_mod and _checkpoint_wrapped_module."
        )
    weights = {name: weight for name, weight in left_out.items() if id(weight) in own}
    return unwrapped, {unwrapped_name(name): _sample(weight) for name, weight in weights.items()}


def _sample(weight: torch.Tensor) -> str:
    if is_frozen_of_torchao(weight):
        weight = getattr(weight, weight.__tensor_flatten__()[0][0])  # type: ignore[attr-defined]  # torch's own protocol
    return sample(weight).hex()


def _persistent(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    for path, each in module.named_modules():
        for name, buffer in each.named_buffers(path, recurse=False):
            if name.rpartition(".")[2] not in NON_PERSISTENT.of(each):
                yield name, buffer


def tied_in(state: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return the names of each tensor that has several."""
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    return [group for group in names.values() if len(group) > 1]
