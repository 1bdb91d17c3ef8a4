"""Tensors that other ranks hold: what a program computes with them and with values of this rank raises an error.

So does a call of a module whose parameters other ranks hold: the user's own module, in place of the pipeline. On this
rank it would return a tensor without values, or fail far inside torch.

Torch takes some of it without a word. ``target.data.mul_(0.9).add_(online.data, alpha=0.1)`` (BYOL, MoCo) adds nothing
where ``online`` is on the meta device.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from nxdpp.ground.torch_names import BUFFERS, FORWARD_PRE_HOOKS, PARAMETERS
from nxdpp.pipeline.local.own_save import refuse_pickle
from nxdpp.pipeline.partition.assignment import Owners
from nxdpp.tensor.tensor_attributes import copy_tensor_model_parallel_attributes
from nxdpp.tracing.code.frames import caller
from nxdpp.tracing.graph.errors import calling_frame, model_line, stack_line
from nxdpp.tracing.modules import listings
from nxdpp.tracing.values.nested import leaves_of

# They write a tensor that no stage of this rank reads, as the load of a whole state dict does.
_WRITES = frozenset({torch.Tensor.copy_, torch.Tensor.data.__set__, torch.Tensor.grad.__set__})  # type: ignore[attr-defined, union-attr]  # descriptors


def _plain(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call ``func`` as for tensors of no subclass."""
    return torch.Tensor.__torch_function__(func, (), args, dict(kwargs))  # type: ignore[no-untyped-call]


class ElsewhereTensor(torch.Tensor):
    """A tensor on the meta device that another rank has the values of, or that follows from one.

    Attributes:
        held_as: the name in the model.
    """

    held_as: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``func``. Raises ``RuntimeError`` if tensors with values are among the arguments."""
        if not all(issubclass(each, torch.Tensor) for each in types):
            return NotImplemented
        kwargs = kwargs or {}
        first: Any = args[0] if len(args) == 1 and not kwargs else None
        # Code may ask for an attribute of each parameter in each step.
        if not isinstance(first, ElsewhereTensor):
            tensors = [leaf for leaf in leaves_of((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
            first = next(tensor for tensor in tensors if isinstance(tensor, ElsewhereTensor))
            is_write = func in _WRITES and args[0] is first
            # A number may be a tensor without dimensions.
            if not is_write and any((t.ndim or not first.ndim) and not t.is_meta for t in tensors):
                _refuse(first.held_as)
        result = _plain(func, args, kwargs)
        if type(result) is torch.Tensor and result.is_meta:
            result = _held_as(first.held_as, result.as_subclass(ElsewhereTensor))
        return result

    def __deepcopy__(self, memo: Any) -> "ElsewhereTensor":
        memo[id(self)] = copied = buffer_elsewhere(self, self.held_as)
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_pickle(self.held_as)


class ElsewhereParameter(ElsewhereTensor, nn.Parameter):
    """A parameter that another rank holds.

    Attributes:
        is_freed: ``True`` if this rank had its values before the model was wrapped.
    """

    is_freed = False

    def __deepcopy__(self, memo: Any) -> "ElsewhereParameter":
        memo[id(self)] = copied = parameter_elsewhere(self, self.held_as)
        return copied


_Held = TypeVar("_Held", bound=ElsewhereTensor)


def parameter_elsewhere(parameter: nn.Parameter, name: str) -> ElsewhereParameter:
    """Return what is in place of ``parameter`` on a rank that does not hold it; ``name`` is its name.

    Raises ``ValueError`` for a ``DTensor``, and for one that stands for several tensors, unless it is frozen and of
    torchao.
    """
    if hasattr(parameter, "__tensor_flatten__") and not is_frozen_of_torchao(parameter):
        # Here only, since its import takes long.
        from torch.distributed.tensor import DTensor

        kind = type(parameter.data)
        if issubclass(kind, DTensor):
            raise ValueError(
                f"{name} is a DTensor, a part of a tensor over ranks, and a stage holds plain tensors. Give the model "
                f"before fully_shard or parallelize_module; nxdpp.tensor_parallelize divides it."
            )
        raise ValueError(
            f"{name} is a {kind.__name__}, which stands for several tensors, and a stage holds plain ones and frozen "
            f"ones of torchao. For adapters over torchao's weights freeze it: requires_grad_(False)."
        )
    made = ElsewhereParameter(on_meta(parameter), parameter.requires_grad)
    made.is_freed = not parameter.is_meta or is_freed(parameter)
    copy_tensor_model_parallel_attributes(made, parameter)
    return _held_as(name, made)


def is_freed(parameter: nn.Parameter) -> bool:
    """Return whether ``parameter`` has no values because other ranks hold it."""
    return isinstance(parameter, ElsewhereParameter) and parameter.is_freed


def is_frozen_of_torchao(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a frozen quantized weight of torchao, which stands for several tensors."""
    return (
        hasattr(tensor, "__tensor_flatten__")
        and not tensor.requires_grad
        and type(tensor).__module__.partition(".")[0] == "torchao"
    )


def buffer_elsewhere(buffer: torch.Tensor, name: str) -> ElsewhereTensor:
    """Return what is in place of ``buffer`` on a rank that does not hold it; ``name`` is its name."""
    return _held_as(name, on_meta(buffer).as_subclass(ElsewhereTensor))


def take_back(root: nn.Module) -> None:
    """Put ordinary tensors on the meta device in place of those that never had values on this rank.

    A model that is built on the meta device may be wrapped again, with other cuts.
    """
    made: dict[int, torch.Tensor] = {}
    for module in listings.modules(root):
        registries: tuple[dict[str, Any], ...] = (PARAMETERS.of(module), BUFFERS.of(module))
        for registry in registries:
            for key, tensor in registry.items():
                if isinstance(tensor, ElsewhereTensor) and not getattr(tensor, "is_freed", False):
                    registry[key] = made.setdefault(id(tensor), ordinary(tensor))


def ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """Return an ordinary tensor on the meta device like ``tensor``, which may be one that another rank holds."""
    if not isinstance(tensor, ElsewhereTensor):
        return tensor
    if not isinstance(tensor, nn.Parameter):
        return on_meta(tensor)
    parameter = nn.Parameter(on_meta(tensor), tensor.requires_grad)
    copy_tensor_model_parallel_attributes(parameter, tensor)
    return parameter


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor on the meta device like ``tensor``, which may be a frozen quantized weight of torchao."""
    if is_frozen_of_torchao(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    made: torch.Tensor = _plain(torch.empty_like, (tensor,), {"device": "meta"})
    return made


def _held_as(name: str, tensor: _Held) -> _Held:
    tensor.held_as = name
    return tensor


def _refuse(name: str) -> NoReturn:
    frame = calling_frame(caller(1))
    raise RuntimeError(
        f"another rank holds {name}, and this rank computes with it and with values of its own\n"
        f"  at {model_line(frame and stack_line(frame))}\n"
        f"Make one layer of the modules that belong together (a layer and its average), so that one rank has both."
    )


def refuse_calls_elsewhere(root: nn.Module, owners: Owners, local: nn.Module) -> None:
    """Make each outermost module of ``root`` that ``local`` has no part of raise ``RuntimeError`` in a call.

    No stage of this rank runs such a module. Traces, which give it tensors without values, still do.
    """
    here = {name for name, _ in listings.named_modules(local, remove_duplicate=False)}
    for name, module in listings.named_modules(root, remove_duplicate=False):
        is_outermost = name not in here and name.rpartition(".")[0] in here
        if not is_outermost or any(map(is_refusal, FORWARD_PRE_HOOKS.of(module).values())):
            continue
        if any(map(is_freed, listings.parameters(module))):
            inside = (ranks for parameter, ranks in owners.items() if parameter.startswith(f"{name}."))
            refuse = _Refusal(name, type(root).__name__, sorted(set().union(*inside)))
            module.register_forward_pre_hook(refuse, with_kwargs=True)


def is_refusal(hook: object) -> bool:
    """Return whether ``hook`` is one of ``refuse_calls_elsewhere``, also of another wrapper over the same module."""
    return isinstance(hook, _Refusal)


@dataclass(eq=False)
class _Refusal:
    """The hook of the module ``name`` in a model of the type ``model``, which the pipeline ``ranks`` hold."""

    name: str
    model: str
    ranks: list[int]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise ``RuntimeError`` for a call with values. Copies of ``module`` that have values may be called."""
        has_values = any(type(leaf) is torch.Tensor and not leaf.is_meta for leaf in leaves_of((args, dict(kwargs))))
        if has_values and any(parameter.is_meta for parameter in listings.parameters(module)):
            raise RuntimeError(
                f"{self.name} ({type(module).__name__}) is called on a rank that has no values of it: after wrapping, "
                f"the {self.model} holds on each rank what its stages run, and {self.name} is on pipeline rank "
                f"{', '.join(map(str, self.ranks))}. Run steps of the wrapped model, on all ranks: "
                f"wrapped.run_train(...) for forward and backward, wrapped.run_eval(...) for forward only."
            )
