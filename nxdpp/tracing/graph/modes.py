"""Modes of torch that code outside the layers changes while it is traced: gradients off, autocast, attention kernels.

``with torch.no_grad():`` works on the thread that runs it, under any name. The trace therefore reads the modes
themselves whenever it adds a node, and a stage sets the same modes around the node::

    with torch.no_grad():                      a  {gradients: False}
        a = self.frozen(x)                     b
    b = self.layer(a)                          c  {autocast cpu: (True, bfloat16)}, block 1
    with torch.autocast("cpu"):                d  {autocast cpu: (True, bfloat16)}, block 1
        c = self.head(b)
        d = self.head(c)

Autocast keeps the converted weights until its outermost block ends. Nodes of one block have its number, so that a
stage keeps them for as long.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import fx
from torch.autograd.graph import saved_tensors_hooks
from torch.backends import cuda
from torch.nn import attention
from torch.overrides import TorchFunctionMode

from nxdpp.devices.autocast import AUTOCAST_TYPES
from nxdpp.ground.torch_names import DEFAULT_DEVICE, TorchDispatchMode
from nxdpp.tracing.graph.swap import in_this_thread, replaced, swapped_in_this_thread

_META = "modes"
_NO_VALUE = frozenset({"placeholder", "get_attr", "output"})


class Modes(NamedTuple):
    """Modes of a node where they differ from the modes around the model.

    ``changes`` has the name and the value of each. ``block`` is the number of the outermost autocast block, 0 outside.
    """

    changes: tuple[tuple[str, Any], ...] = ()
    block: int = 0


_NONE = Modes()


class _Mode(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], Any]


_KERNELS = {
    "flash attention": _Mode(cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    "mem_efficient attention": _Mode(cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    "math attention": _Mode(cuda.math_sdp_enabled, cuda.enable_math_sdp),
    "cudnn attention": _Mode(cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
}
# A trace replaces functions that make tensors. Torch lists them when a default device is first used.
_empty = torch.empty
with torch.device("cpu"):
    _empty(0)


@cache
def _modes() -> dict[str, _Mode]:
    """The modes that a stage repeats, by name."""
    types = [kind for kind in AUTOCAST_TYPES if kind != "xla"]
    return {
        "gradients": _Mode(torch.is_grad_enabled, torch.set_grad_enabled),
        "autocast cache": _Mode(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        **{f"autocast {t}": _Mode(partial(_read_autocast, t), partial(_write_autocast, t)) for t in types},
        **_KERNELS,
    }


_backends: Any = torch.backends
_MULTIPLIERS = (_backends.cuda.matmul, _backends.cudnn.conv, _backends.mkldnn.matmul, _backends.mkldnn.conv)
_INSIDE = "Use it inside a layer, or around the whole step."
# Modes that a stage does not repeat, each with a read and the remedy.
_REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "torch.inference_mode": (torch.is_inference_mode_enabled, "Use torch.no_grad()."),
    "a default device": (lambda: _default_device(), "Give device=... to the functions that make tensors."),
    "torch.set_default_dtype": (torch.get_default_dtype, "Give dtype=... to the functions that make tensors."),
    "torch.use_deterministic_algorithms": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        _INSIDE,
    ),
    "torch.backends.cudnn.flags": (
        lambda: (_backends.cudnn.enabled, _backends.cudnn.benchmark, _backends.cudnn.deterministic),
        _INSIDE,
    ),
    "torch.backends.mkldnn.flags": (lambda: _backends.mkldnn.enabled, _INSIDE),
    "torch.set_float32_matmul_precision": (lambda: [part.fp32_precision for part in _MULTIPLIERS], _INSIDE),
}
# Modes that torch has no public way to read: the trace follows who enters them.
_ENTERED: dict[str, tuple[type, str]] = {
    "a TorchFunctionMode": (
        TorchFunctionMode,
        "Use it inside the forward of a layer, or of a module next to the layers.",
    ),
    "a torch dispatch mode": (TorchDispatchMode, _INSIDE),
    "torch.autograd.graph.saved_tensors_hooks": (saved_tensors_hooks, _INSIDE),
}


def modes_of(node: fx.Node) -> Modes:
    """The modes of ``node`` where they differ from the modes around the model."""
    modes: Modes = node.meta.get(_META, _NONE)
    return modes


def current_modes() -> Modes:
    """All modes of this thread, hashable: two calls under the same modes return equal values."""
    return Modes(tuple([(name, mode.read()) for name, mode in _modes().items()]))


@contextmanager
def recorded_modes(graph: fx.Graph) -> Iterator[None]:
    """Note at each new node of ``graph`` the modes that are changed inside. Restore all modes afterwards.

    Raises ``RuntimeError`` for a mode that a stage cannot repeat, and for one that is still changed at the end.
    """
    recorder = _ModeRecorder(graph.create_node)
    nesting = {
        "autocast_increment_nesting": recorder.increment_nesting,
        "autocast_decrement_nesting": recorder.decrement_nesting,
        "clear_autocast_cache": recorder.clear_cache,
        "set_autocast_enabled": _answered(torch.set_autocast_enabled),
    }
    set_gradients = torch.set_grad_enabled.__init__
    gradients = patch.object(
        torch.set_grad_enabled, "__init__", in_this_thread(_answered(set_gradients), set_gradients)
    )
    before = current_modes()
    vars(graph)["create_node"] = recorder.create_node
    try:
        with swapped_in_this_thread(vars(torch), nesting), gradients, _followed(recorder.entered):
            yield
        left = [name for name, value in before.changes if _modes()[name].read() != value]
        if left:
            raise RuntimeError(
                f"forward changes a mode of torch ({left[0]}) and leaves it changed, for the backward and for the next "
                f"forward too. Put it back at the end of forward, or use a with block."
            )
    finally:
        del vars(graph)["create_node"]
        for name, value in before.changes:
            _modes()[name].write(value)


def _answered(write: Callable[..., Any]) -> Callable[..., Any]:
    """``write`` with the answer of a traced question (``weight.requires_grad``), which C code takes for ``False``."""

    def call(*arguments: Any) -> Any:
        return write(*(bool(each) if isinstance(each, fx.Proxy) else each for each in arguments))

    return call


@contextmanager
def _followed(entered: list[tuple[str, Any]]) -> Iterator[None]:
    """Keep in ``entered`` the modes of ``_ENTERED`` in which this thread runs."""
    with ExitStack() as stack:
        for name, (mode, _) in _ENTERED.items():
            stack.enter_context(patch.multiple(mode, **_followers(name, mode, entered)))
        yield


def _followers(name: str, mode: Any, entered: list[tuple[str, Any]]) -> dict[str, Any]:
    begin, end = mode.__enter__, mode.__exit__

    def enter(self: Any) -> Any:
        result = begin(self)
        # The hooks of a checkpoint change no number.
        if mode is not saved_tensors_hooks or "checkpoint" not in type(self).__name__:
            entered.append((name, self))
        return result

    def leave(self: Any, *details: Any) -> Any:
        own = [place for place, (_, each) in enumerate(entered) if each is self]
        if own:
            del entered[own[-1]]
        return end(self, *details)

    return {"__enter__": in_this_thread(enter, begin), "__exit__": in_this_thread(leave, end)}


def refused_kernel_order(namespaces: Iterable[dict[str, Any]]) -> AbstractContextManager[None]:
    """Refuse an order of attention kernels, under any name that ``sdpa_kernel`` has in ``namespaces``.

    Torch has no public way to read it.
    """
    original = attention.sdpa_kernel

    def without_order(backends: Any, set_priority: bool = False) -> Any:
        if set_priority:
            raise RuntimeError(
                f"sdpa_kernel(..., set_priority=True) is used outside the transformer layers, which a stage does not "
                f"repeat. {_INSIDE}"
            )
        return original(backends)

    return replaced([vars(attention), *namespaces], {id(original): in_this_thread(without_order, original)})


class _ModeRecorder:
    def __init__(self, create_node: Callable[..., fx.Node]) -> None:
        self.entered: list[tuple[str, Any]] = []
        self._create_node = create_node
        self._values = [(name, mode.read, mode.read()) for name, mode in _modes().items()]
        self._refused = [(name, read, read(), remedy) for name, (read, remedy) in _REFUSED.items()]
        self._increment, self._decrement = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
        self._clear = torch.clear_autocast_cache
        self._depth = 0
        self._blocks = 0

    def create_node(self, op: str, *args: Any, **kwargs: Any) -> fx.Node:
        node = self._create_node(op, *args, **kwargs)
        if op in _NO_VALUE:
            return node
        changed = [(name, remedy) for name, read, before, remedy in self._refused if read() != before]
        for name, remedy in (*changed, *((name, _ENTERED[name][1]) for name, _ in self.entered)):
            raise RuntimeError(
                f"{name} is used outside the transformer layers, which a stage does not repeat. {remedy}"
            )
        changes = tuple((name, now) for name, read, before in self._values if (now := read()) != before)
        block = self._blocks if self._depth else 0
        if changes or block:
            node.meta[_META] = Modes(changes, block)
        return node

    def increment_nesting(self) -> int:
        self._blocks += not self._depth
        self._depth += 1
        return self._increment()

    def decrement_nesting(self) -> int:
        self._depth -= 1
        return self._decrement()

    def clear_cache(self) -> None:
        if self._depth:
            raise RuntimeError(
                "torch.clear_autocast_cache is called inside an autocast block outside the transformer layers; traced, "
                "it would have no effect. End the block and begin another one."
            )
        self._clear()


class RunningModes:
    """Modes of this thread, changed from node to node; ``names`` are the ones that will change."""

    def __init__(self, names: Iterator[str] | tuple[str, ...]) -> None:
        self._before = {name: _modes()[name].read() for name in names}
        self._now = dict(self._before)
        self._block = 0

    def change(self, modes: Modes) -> None:
        """Set ``modes``, and put all modes that they do not name back to their values from before."""
        if self._block and self._block != modes.block:
            self._leave_block()
        for name, value in {**self._before, **dict(modes.changes)}.items():
            if self._now[name] != value:
                _modes()[name].write(value)
                self._now[name] = value
        if modes.block and not self._block:
            torch.autocast_increment_nesting()
        self._block = modes.block

    def restore(self) -> None:
        """Set the modes from before, whatever code has changed since."""
        if self._block:
            self._leave_block()
        for name, value in self._before.items():
            _modes()[name].write(value)

    def _leave_block(self) -> None:
        # As autocast does at the end of its block.
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        self._block = 0


@contextmanager
def applied(modes: Modes) -> Iterator[None]:
    """Set ``modes`` inside."""
    running = RunningModes(tuple(name for name, _ in modes.changes))
    try:
        running.change(modes)
        yield
    finally:
        running.restore()


@contextmanager
def applied_to_fakes(modes: Modes) -> Iterator[None]:
    """Set ``modes`` inside, for a thread that runs fake tensors.

    Autocast has one store of converted weights for all threads. The thread neither adds to it nor clears it.
    """
    with applied(Modes((*modes.changes, ("autocast cache", False)))):
        torch.autocast_increment_nesting()
        try:
            yield
        finally:
            torch.autocast_decrement_nesting()


def _default_device() -> torch.device:
    made = _empty(0).device
    of_program = DEFAULT_DEVICE.found.CURRENT_DEVICE if DEFAULT_DEVICE.exists else None
    # torch puts the mode of set_default_device away while a function of torch.nn.functional runs for it.
    return made if of_program is None or made.type != "cpu" else _empty(0, device=of_program).device


def _read_autocast(device_type: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


def _write_autocast(device_type: str, value: tuple[bool, torch.dtype]) -> None:
    torch.set_autocast_enabled(device_type, value[0])
    torch.set_autocast_dtype(device_type, value[1])
