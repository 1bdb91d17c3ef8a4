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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._device import DeviceContext

from nxdpp.tracing.graph.swap import swapped_in_this_thread

_META = "modes"
_NO_VALUE = frozenset({"placeholder", "get_attr", "output"})
_KERNELS = ("flash", "mem_efficient", "math", "cudnn", "overrideable")


class Modes(NamedTuple):
    """Modes of a node where they differ from the modes around the model.

    ``changes`` has the name and the value of each. ``block`` is the number of the outermost autocast block, 0 outside.
    """

    changes: tuple[tuple[str, Any], ...] = ()
    block: int = 0


_NONE = Modes()


class _Mode(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], None]


class _Refused(NamedTuple):
    read: Callable[[], Any]
    remedy: str


@cache
def _modes() -> dict[str, _Mode]:
    """The modes that a stage repeats, by name."""
    accelerator = torch.accelerator.current_accelerator()
    types = dict.fromkeys(("cpu", "cuda", *([] if accelerator is None else [accelerator.type])))
    return {
        "gradients": _Mode(torch.is_grad_enabled, torch._C._set_grad_enabled),
        "autocast cache": _Mode(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        **{f"autocast {t}": _Mode(partial(_read_autocast, t), partial(_write_autocast, t)) for t in types},
        **{f"{k} attention": _Mode(_of_torch("get", k), _of_torch("set", k)) for k in _KERNELS},
        "order of attention kernels": _Mode(_read_kernel_order, _write_kernel_order),
    }


_INSIDE = "Use it inside a layer, or around the whole step."
_REFUSED = {
    "torch.inference_mode": _Refused(torch.is_inference_mode_enabled, "Use torch.no_grad()."),
    "a default device": _Refused(
        lambda: _function_modes(lambda mode: isinstance(mode, DeviceContext)),
        "Give device=... to the functions that make tensors.",
    ),
    "a TorchFunctionMode": _Refused(
        lambda: _function_modes(lambda mode: not isinstance(mode, DeviceContext)),
        "Use it inside the forward of a layer, or of a module next to the layers.",
    ),
    "a torch dispatch mode": _Refused(torch._C._len_torch_dispatch_stack, _INSIDE),
    "torch.autograd.graph.saved_tensors_hooks": _Refused(lambda: _saved_tensors_hooks(), _INSIDE),
    "torch.set_default_dtype": _Refused(
        torch.get_default_dtype, "Give dtype=... to the functions that make tensors."
    ),
    "torch.use_deterministic_algorithms": _Refused(
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        _INSIDE,
    ),
    "torch.backends.cudnn.flags": _Refused(
        lambda: (
            torch._C._get_cudnn_enabled(), torch._C._get_cudnn_benchmark(), torch._C._get_cudnn_deterministic()
        ),
        _INSIDE,
    ),
    "torch.backends.mkldnn.flags": _Refused(torch._C._get_mkldnn_enabled, _INSIDE),
    "torch.set_float32_matmul_precision": _Refused(lambda: _float32_precision(), _INSIDE),
}  # fmt: skip


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
    gradients = {"_set_grad_enabled": _answered(torch._C._set_grad_enabled)}
    before = current_modes()
    vars(graph)["create_node"] = recorder.create_node
    try:
        with swapped_in_this_thread(vars(torch), nesting), swapped_in_this_thread(vars(torch._C), gradients):
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


class _ModeRecorder:
    def __init__(self, create_node: Callable[..., fx.Node]) -> None:
        self._create_node = create_node
        self._values = [(name, mode.read, mode.read()) for name, mode in _modes().items()]
        self._refused = [(name, refused, refused.read()) for name, refused in _REFUSED.items()]
        self._increment, self._decrement = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
        self._clear = torch.clear_autocast_cache
        self._depth = 0
        self._blocks = 0

    def create_node(self, op: str, *args: Any, **kwargs: Any) -> fx.Node:
        node = self._create_node(op, *args, **kwargs)
        if op in _NO_VALUE:
            return node
        for name, refused, before in self._refused:
            if refused.read() != before:
                raise RuntimeError(
                    f"{name} is used outside the transformer layers, which a stage does not repeat. {refused.remedy}"
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


def _read_autocast(device_type: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


def _write_autocast(device_type: str, value: tuple[bool, torch.dtype]) -> None:
    torch.set_autocast_enabled(device_type, value[0])
    torch.set_autocast_dtype(device_type, value[1])


def _of_torch(verb: str, kernel: str) -> Any:
    name = f"_get_{kernel}_sdp_enabled" if verb == "get" else f"_set_sdp_use_{kernel}"
    return getattr(torch._C, name)


def _read_kernel_order() -> tuple[int, ...]:
    return tuple(torch._C._get_sdp_priority_order())


def _write_kernel_order(order: tuple[int, ...]) -> None:
    torch._C._set_sdp_priority_order(list(order))


def _function_modes(is_meant: Callable[[Any], bool]) -> list[int]:
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return [id(mode) for mode in modes if is_meant(mode)]


def _saved_tensors_hooks() -> Any:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    # The hooks of a checkpoint change no number.
    is_checkpoint = hooks is not None and "checkpoint" in getattr(hooks[0], "__qualname__", "")
    return None if is_checkpoint else hooks


def _float32_precision() -> Any:
    read = torch._C._get_fp32_precision_getter
    return [read(*place) for place in (("cuda", "matmul"), ("cuda", "conv"), ("mkldnn", "matmul"), ("mkldnn", "conv"))]
