"""Questions of code about data on a device, answered from the host's copy of the step's inputs.

transformers' masks ask ``padding_mask.all()``. The host would wait for all work that the device has been given, once
a microbatch on each rank, and could not run ahead of it::

    device    mask ── to(bool) ── all()               the calls of a block, as they are made
    host      mask ── to(bool) ── all() ── bool       the same calls, when the code asks

The host computes only what leads to the question, of integers, of constants and of inputs as they are. So the answer is
the device's. Inputs that are on the device already are copied to the host together, once a step: the first question
waits for that.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from nxdpp.devices.kinds import device_of
from nxdpp.ground.torch_names import VERSION, pytree

_HOST, _CALL = MARKS = "_nxdpp_on_host", "_nxdpp_call"
"""Attributes of tensors."""
_ASK = {torch.Tensor.__bool__, torch.Tensor.item, torch.Tensor.__int__, torch.Tensor.__index__, torch.Tensor.tolist}
# A device makes of these what the host makes; a float from 0 to a number may differ in the last bit.
_CONSTANTS = (torch.ones, torch.zeros, torch.full)
# Words in the names of functions that draw random numbers.
_DRAWS = ("rand", "bernoulli", "multinomial", "normal", "poisson", "binomial", "dropout", "exponential")
# What is computed of an input has its size, a mask of all pairs of tokens is larger.
_MOST_ELEMENTS = 1 << 20


def note_host_copy(tensor: torch.Tensor, host: torch.Tensor) -> None:
    """Note that ``tensor`` of a device has the values of ``host``, as long as nothing changes one of them."""
    setattr(tensor, _HOST, _HostCopy(lambda: host, host, _versions(tensor, host)))


class _Copies:
    """Copies to the host of inputs of a step that are on a device.

    They start with the step if one of an earlier step was asked for, and else when it is: behind the work until then.
    """

    are_asked = False

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        # The tensors refer to this object.
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._found: dict[int, torch.Tensor] = {}
        self._copied = self._start() if _Copies.are_asked else None

    def of(self, number: int) -> torch.Tensor:
        """Return the copy of a tensor, by its number; the first call waits."""
        _Copies.are_asked = True
        if not self._found:
            self._found = (self._copied or self._start())()
        return self._found[number]

    def _start(self) -> Callable[[], dict[int, torch.Tensor]]:
        tensors = {number: tensor for number, known in enumerate(self._tensors) if (tensor := known()) is not None}
        copied = device_of(next(iter(tensors.values())).device).to_host_together(list(tensors.values()))
        return lambda: dict(zip(tensors, copied(), strict=True))


def can_be_copied(tensor: torch.Tensor) -> bool:
    """Return whether the host may copy an input of a step to answer questions about it."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    return is_plain and not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() <= _MOST_ELEMENTS


def note_inputs(tensors: Sequence[torch.Tensor]) -> None:
    """Note that the host may copy ``tensors``, inputs of a step that are on a device, once it is asked for one."""
    if not tensors:
        return
    copies = _Copies(tensors)
    for number, tensor in enumerate(tensors):
        setattr(tensor, _HOST, _HostCopy(partial(copies.of, number), None, _versions(tensor, tensor)))


def note_call(result: Any, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Note that ``func(*args, **kwargs)`` has given the tensor ``result``."""
    is_noted = isinstance(result, torch.Tensor) and not result.is_cpu and result.numel() <= _MOST_ELEMENTS
    if is_noted and not _holds((args, kwargs), result):
        setattr(result, _CALL, _NotedCall(func, args, kwargs, _version(result)))


class _NotedCall(NamedTuple):
    func: Callable[..., Any]
    args: Any
    kwargs: Any
    version: int


class _HostCopy(NamedTuple):
    copy: Callable[[], torch.Tensor]
    host: torch.Tensor | None  # that the user may change
    versions: tuple[int, int]

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # A tensor that is copied or written has no answers: a module may keep its mask, and be saved.
        return type(None), ()


def _version(tensor: torch.Tensor) -> int:
    # Tensors of inference mode do not count their changes.
    return -1 if tensor.is_inference() else int(VERSION.of(tensor))


def _versions(tensor: torch.Tensor, host: torch.Tensor) -> tuple[int, int]:
    return _version(tensor), _version(host)


def _holds(values: Any, tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is one of the values, as where ``mask.bool()`` has nothing to do."""
    return any(leaf is tensor for leaf in pytree.tree_leaves(values))


class _NotOnHostError(Exception):
    """The host does not have the values."""


class HostAnswers(TorchFunctionMode):
    """Answers the questions of the block where they follow from tensors whose host copy is known."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: dict[int, tuple[torch.Tensor, Callable[..., Any], Any, Any, int]] = {}
        self._is_changed = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer a question, or call the function and note the call."""
        kwargs = kwargs or {}
        if func in _ASK and not args[0].is_cpu and not self._is_changed:
            try:
                return func(self._on_host(args[0]))
            except _NotOnHostError:
                pass
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if "out" in kwargs or name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            self._is_changed = True
        for place, leaf in enumerate(pytree.tree_leaves(result)):
            if isinstance(leaf, torch.Tensor) and leaf.numel() <= _MOST_ELEMENTS:
                self._calls.setdefault(id(leaf), (leaf, func, args, kwargs, place))
        return result

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_cpu:
            return tensor
        known: _HostCopy | None = getattr(tensor, _HOST, None)
        if known is not None:
            if known.versions != _versions(tensor, tensor if known.host is None else known.host):
                raise _NotOnHostError
            return known.copy()
        call: _NotedCall | None = getattr(tensor, _CALL, None)
        if call is not None and call.version == _version(tensor):
            (func, args, kwargs), place = call[:3], 0
        elif id(tensor) in self._calls:
            _, func, args, kwargs, place = self._calls[id(tensor)]
        else:
            raise _NotOnHostError
        # The host would draw other numbers, and move its generator. A function that makes a tensor may draw it.
        draws = any(word in getattr(func, "__name__", "") for word in _DRAWS)
        makes = func is not torch.arange and not any(map(torch.is_tensor, pytree.tree_leaves((args, kwargs))))
        differs = draws or makes or tensor.is_floating_point() or tensor.is_complex()
        if (differs and func not in _CONSTANTS) or _holds((args, kwargs), tensor):
            raise _NotOnHostError
        args, kwargs = pytree.tree_map(self._argument, (args, kwargs))
        found: torch.Tensor = pytree.tree_leaves(func(*args, **kwargs))[place]
        # A module may keep the tensor, and ask in a later step: the length of dynamic RoPE.
        note_host_copy(tensor, found)
        return found

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._on_host(value)
        return torch.device("cpu") if isinstance(value, torch.device) else value


def have_host_copies(values: Iterable[Any]) -> bool:
    """Return whether the host has a copy of one of the tensors, or can make one."""
    return any(hasattr(value, _HOST) or hasattr(value, _CALL) for value in values)
