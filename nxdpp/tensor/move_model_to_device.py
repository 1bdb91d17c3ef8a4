"""Move of a model to a device that keeps the classes, attributes, hooks and ties of its parameters."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from nxdpp.counted import counted
from nxdpp.gradients.replaced_parameters import check_no_optimizer_holds, watch_replaced
from nxdpp.gradients.shards.local_tensors import is_sharded
from nxdpp.ground.torch_names import BACKWARD_HOOKS, BUFFERS, POST_ACCUMULATE_HOOKS
from nxdpp.ranks import parallel_state

_REMEDY = "Make the optimizer after move_model_to_device(), from the parameters that the model has then."


def move_model_to_device(model: nn.Module, device: torch.device | str | int) -> None:
    """Move all parameters, their gradients and all buffers of ``model`` to ``device``; not collective.

    Between some device types torch must make a new ``Parameter``. It replaces the old one in all modules that
    share it. It gets the class, the hooks and the attributes of the old one, such as
    ``parameter.tensor_model_parallel``. A parameter that is already on ``device`` stays the same object.

    Raises:
        ValueError: for a device that does not exist here, and for parameters or buffers on the meta device.
        RuntimeError: for an optimizer that holds parameters which torch must replace. Nothing is changed then.
    """
    target = checked_device(device)
    if all(tensor.device == target for tensor in (*model.parameters(), *model.buffers())):
        return
    _check_have_values(model, target)
    convert_parameters(model, lambda tensor: tensor.to(target), lambda: model.to(target))


def convert_parameters(
    model: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], run: Callable[[], object]
) -> bool:
    """Call ``run``, in which torch applies ``convert`` to the parameters of ``model``; return whether it replaced any.

    Replaced parameters keep their classes, attributes, hooks and ties. Raises ``RuntimeError`` for an optimizer that
    holds one of them, before anything is changed.
    """
    before = dict(model.named_parameters(remove_duplicate=False))
    whole = {name: each for name, each in before.items() if not is_sharded(each)}
    if len(whole) != len(before):
        _check_sharded_stay(model, convert)
    is_replaced = {
        kind: _is_replaced(torch.empty(0, device=kind[0], dtype=kind[1]), convert)
        for kind in {(parameter.device, parameter.dtype) for parameter in whole.values()}
    }
    replaced = {name: each for name, each in whole.items() if is_replaced[each.device, each.dtype]}
    check_no_optimizer_holds(replaced, _REMEDY)
    if len(whole) == len(before):
        run()
    else:
        _convert_others(model, convert, whole, replaced)
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        old = before[name]
        if parameter is old:
            continue
        if old in moved:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, moved[old])
            continue
        keep_attributes(old, parameter)
        # The handles of the hooks remove them from the same dicts.
        for kind in (BACKWARD_HOOKS, POST_ACCUMULATE_HOOKS):
            if hooks := kind.of(old):
                kind.set(parameter, hooks)
        moved[old] = parameter
    watch_replaced(replaced)
    return bool(moved)


def _check_sharded_stay(model: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Raise ``RuntimeError`` if ``convert`` would change a sharded parameter.

    Rows that are kept on the host stay there in a move to this rank's device.
    """
    for name, parameter in model.named_parameters():
        if not is_sharded(parameter):
            continue
        converted = convert(torch.empty(0, device=parameter.device, dtype=parameter.dtype))
        devices = (parameter.device, parallel_state.local_device())
        if converted.dtype != parameter.dtype or converted.device not in devices:
            raise RuntimeError(
                f"{name} is sharded, and stays {parameter.dtype} on {parameter.device}: convert and move the model "
                f"before fully_shard. mp_policy of fully_shard computes in another dtype."
            )


def _convert_others(
    model: nn.Module,
    convert: Callable[[torch.Tensor], torch.Tensor],
    whole: Mapping[str, nn.Parameter],
    replaced: Mapping[str, nn.Parameter],
) -> None:
    """Convert the buffers and the ``whole`` parameters, as ``nn.Module.to`` does with a model that has no shards."""
    for name, parameter in whole.items():
        if name in replaced:
            owner, _, attribute = name.rpartition(".")
            new = nn.Parameter(convert(parameter.data), parameter.requires_grad)
            setattr(model.get_submodule(owner), attribute, new)
    for parameter in {*whole.values()} - {*replaced.values()}:
        parameter.data = convert(parameter.data)
    for module in model.modules():
        for name, buffer in BUFFERS.of(module).items():
            if buffer is not None:
                BUFFERS.of(module)[name] = convert(buffer)


def keep_attributes(old: nn.Parameter, new: nn.Parameter) -> None:
    """Give ``new``, which replaces ``old``, the class and the attributes of ``old``."""
    if type(new) is not type(old):
        new.__class__ = type(old)
    vars(new).update(vars(old))


def checked_device(device: torch.device | str | int) -> torch.device:
    """``device`` with its index, as its tensors have it. Raises ``ValueError`` if it does not exist here."""
    try:
        return torch.empty(0, device=torch.device(device)).device
    # torch without CUDA raises an AssertionError.
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"there is no device {str(device)!r} here: {reason} Give one of this machine, such as 'cpu', or leave it "
            f"out for the device of this rank."
        ) from error


def _is_replaced(tensor: torch.Tensor, convert: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Return whether ``Module._apply`` makes a new object of a parameter like ``tensor``, by the check of torch."""
    if torch.__future__.get_swap_module_params_on_conversion():
        return False
    try:
        converted = convert(tensor)
    except NotImplementedError:
        # From the meta device only to_empty gives memory.
        return False
    try:
        tensor.data = converted
    # torch cannot give a tensor values of another type of device.
    except RuntimeError:
        return True
    return torch.__future__.get_overwrite_module_params_on_conversion()


def _check_have_values(model: nn.Module, target: torch.device) -> None:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    without = [name for name, tensor in tensors if tensor.is_meta]
    if without and target.type != "meta":
        raise ValueError(
            f"{counted(len(without), 'parameter or buffer is', 'parameters or buffers are')} on the meta device, "
            f"without values to move to {target} ({without[0]} is the first): materialise them first, "
            f"with model.to_empty(device={str(target)!r}) and an initialization or a checkpoint"
        )
