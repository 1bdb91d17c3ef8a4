"""XLA devices, by way of torch_xla. Only this file names ``torch_xla``.

An operation on an XLA tensor is only recorded. ``submit`` compiles all recorded operations into one graph, or finds it
compiled, and starts it. A value that the host asks for earlier compiles a graph of its own, and the operations before
it run again in the next graph. So each action of a schedule ends with ``submit``.
"""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from nxdpp.devices.daemon_thread import DaemonThread
from nxdpp.devices.device import Compilations, Device, Stamp, Work
from nxdpp.devices.graph_times import GraphTimes, Samples
from nxdpp.devices.kept_graphs import KeptGraphs
from nxdpp.devices.refused_collectives import refuse_collectives
from nxdpp.devices.xla_checks import INSTALL, check_backward, check_own_chip, import_problem
from nxdpp.ground.torch_names import STORAGE_ADDRESS
from nxdpp.ground.xla_names import COMMIT_UPDATE, SYNC_VIEW, XLA_COPIES, XLA_HAS_CACHE

_logger = logging.getLogger(__name__)


class XlaDevice(Device):
    """An XLA device. A stamp is a time of the host and the number of graphs that the device was given until then."""

    def stamp(self) -> Stamp:
        """Return a mark: its time is the end of the graphs so far, at the earliest the present time."""
        return graph_times().mark()

    def between(self, start: Stamp, end: Stamp) -> int:
        """Return the nanoseconds from one mark to a later one; wait until the device has reached the later one."""
        return graph_times().end(end) - graph_times().end(start)

    def origin(self) -> tuple[Stamp, int]:
        """Return a mark and its ``time.perf_counter_ns``; wait until the device is idle."""
        self.synchronize()
        mark = graph_times().mark()
        return mark, graph_times().end(mark)

    def work(self, origin: Stamp, start: Stamp, end: Stamp) -> Work:
        """Return the start of the first and the end of the last graph between two marks, and the compilations."""
        times = graph_times()
        zero, runs = times.end(origin), times.runs(start, end)
        began, ended = (runs[0].start, runs[-1].end) if runs else (times.end(end),) * 2
        return Work(began - zero, ended - zero, [(s - zero, e - zero) for s, e in times.compilations(start, end)])

    def busy(self, step: tuple[Stamp, Stamp], blocks: Sequence[tuple[Stamp, Stamp]]) -> int:
        """Return the nanoseconds in which the device ran the graphs that were started between the stamps of a step."""
        return sum(end - start for start, end in graph_times().runs(*step))

    def compiled(self) -> Compilations:
        """Return the compilations of this process so far."""
        graphs, nanoseconds, _ = _metric("CompileTime")
        return Compilations(graphs, 1e-9 * nanoseconds)

    def keep_graphs(self, folder: Path) -> None:
        """Keep compiled graphs in ``folder``; before the first computation of this process.

        Raises ``RuntimeError`` after it, for a folder other than this process has, and on a device that cannot
        load graphs. A device that fails to load one warns.
        """
        _kept_graphs().keep_in(folder)

    def is_compiling(self) -> bool:
        """Return whether this process compiles a graph at this moment."""
        return graph_times().is_compiling()

    @property
    def kind(self) -> str:
        """``"xla"`` and the type of the PJRT device behind it."""
        return f"xla ({_pjrt_type()})"

    @property
    def runs_grouped_products(self) -> bool:
        """``False``: ``torch.histc`` of integers, which counts the rows of a group, raises."""
        return False

    @property
    def is_lazy(self) -> bool:
        """``True``: XLA records operations."""
        return True

    @property
    def refuses_indices(self) -> bool:
        """``False``: XLA takes the nearest element."""
        return False

    def submit(self) -> None:
        """Start all recorded operations, and wait for none of them; compiles a graph at its first time.

        torch_xla then makes a step in its generator, which is taken back: the random numbers are as without it.
        """
        state = self.random_state()
        _torch_xla().sync()
        if graph_times().settle():
            _kept_graphs().check()
        self.set_random_state(state)

    def expect_updates(self, tensors: Iterable[torch.Tensor]) -> None:
        """Commit an update that changes nothing.

        A view of a tensor that has been updated is recorded at its first use, and one of another tensor at once. The
        order of a graph's results would change with the optimizer's first step, and each graph be compiled again.
        """
        for tensor in tensors:
            if tensor.device.type == "xla":
                COMMIT_UPDATE(tensor)

    def synchronize(self) -> None:
        """Start all recorded operations, and wait until the device is idle."""
        self.submit()
        _xla_model().wait_device_ops()

    def to_host_together(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Start all recorded operations, and copy ``tensors`` in a thread, in one transfer.

        A view of an updated tensor is recorded at its first use. The thread must record nothing: torch_xla takes the
        operations of both threads into the graph that either of them submits, and fails.
        """
        for tensor in tensors:
            SYNC_VIEW(tensor)
        self.submit()
        return _copies().submit(partial(_copied, list(tensors))).result

    def fill(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        """Give ``tensor`` the values of ``host``, which are copied at the call.

        torch_xla makes 0 and 1 without a dimension constants of a graph, and equal numbers one input of it. Another
        value would then be another graph. With a dimension each number is an input of its own.
        """
        tensor.copy_(host if host.dim() else host.view(1).to(self.device).view(()))

    def memory_of(self, tensor: torch.Tensor) -> int:
        """Return the number of the storage object that a tensor shares with its views: it has no address."""
        return int(STORAGE_ADDRESS.of(tensor.untyped_storage()))

    def seed(self, number: int) -> None:
        """Seed the device's generator, which ``torch.manual_seed`` does not know."""
        _xla_model().set_rng_state(number)

    def random_state(self) -> bytes:
        """Return the state of the device's generator: a number of 64 bits without a sign."""
        return int(_xla_model().get_rng_state()).to_bytes(8, "little")

    def set_random_state(self, state: bytes) -> None:
        """Set the state of the device's generator."""
        _xla_model().set_rng_state(int.from_bytes(state, "little"))

    def readable(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in host memory, of which any part is read without a graph."""
        self.submit()
        return tensor.detach().cpu()


def start(local_rank: int | None, local_world_size: int | None) -> torch.device:
    """Start XLA's device of this process, and return it. ``PJRT_DEVICE`` names its type; torch_xla has a default.

    Args:
        local_rank: number of this rank on its host; ``None`` if unknown.
        local_world_size: number of ranks on this host; ``None`` if unknown.

    Raises ``RuntimeError`` if torch_xla is absent or does not fit torch, if the device cannot be used, and after a
    backward in this process.
    """
    is_default = "PJRT_DEVICE" not in os.environ
    try:
        _torch_xla()
    except ImportError as error:
        raise RuntimeError(f"device='xla': {import_problem(error)}. {INSTALL}") from error
    check_own_chip(_pjrt_type(), local_world_size)
    try:
        device: torch.device = _torch_xla().device()
    # PJRT_DEVICE of a library that is absent is an OSError or an ImportError, others are RuntimeError.
    except (RuntimeError, OSError, ImportError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise RuntimeError(
            f"device='xla': PJRT_DEVICE={os.environ.get('PJRT_DEVICE')!r} cannot be used: {reason}. Set PJRT_DEVICE to "
            f"TPU, NEURON or another device of this host, or to CPU for a trial; or give device='cpu'."
        ) from error
    check_backward(device)
    _submit_optimizer_steps()
    refuse_collectives()
    _show_generator()
    if local_rank in (None, 0):
        level = logging.WARNING if is_default else logging.INFO
        chosen = "by default, as PJRT_DEVICE is not set" if is_default else "as PJRT_DEVICE says"
        _logger.log(level, "device='xla' is PJRT's %s, %s; the ranks communicate over gloo", _pjrt_type(), chosen)
    return device


def _pjrt_type() -> str:
    """Return the type of the PJRT device: ``"CPU"``, ``"TPU"``, ``"NEURON"`` or another."""
    return str(import_module("torch_xla.runtime").device_type())


@cache
def _submit_optimizer_steps() -> None:
    """Make each step of an optimizer of XLA tensors start at its end, not in the first action of the next step."""

    def submit(optimizer: torch.optim.Optimizer, *_: object) -> None:
        device = next((p.device for group in optimizer.param_groups for p in group["params"]), None)
        if device is not None and device.type == "xla":
            XlaDevice(device).submit()

    register_optimizer_step_post_hook(submit)


@cache
def graph_times() -> GraphTimes:
    """Return the times of the graphs of this process."""
    return GraphTimes(_counter, _samples, _xla_model().wait_device_ops)


@cache
def _kept_graphs() -> KeptGraphs:
    return KeptGraphs(
        _pjrt_type,
        import_module("torch_xla.runtime").initialize_cache,
        XLA_HAS_CACHE,
        lambda: _counter("PersistentCacheDeserializeFailure"),
    )


def _counter(name: str) -> int:
    from torch_xla.debug import metrics

    return metrics.counter_value(name) or 0


def _samples(name: str) -> Samples:
    count, _, latest = _metric(name)
    return count, latest


def _metric(name: str) -> tuple[int, float, list[tuple[float, float]]]:
    """Return the number of samples, their sum, and the latest ones with the time of each."""
    from torch_xla.debug import metrics

    return metrics.metric_data(name) or (0, 0.0, [])


class ShownGenerator:
    """The generator of this process's one device, as the module of its type in torch: ``torch.xla``.

    ``torch.utils.checkpoint`` looks for it there, and fails for a device type without one. ``get`` and ``set_to`` read
    and set its state, a number.
    """

    _initialized = True

    def __init__(self, get: Callable[[], int], set_to: Callable[[int], object]) -> None:
        self._get = get
        self._set_to = set_to

    def device(self, index: int) -> AbstractContextManager[None]:
        """Return a context of the device."""
        return nullcontext()

    def device_count(self) -> int:
        """Return 1."""
        return 1

    def get_rng_state(self, device: Any = None) -> int:
        """Return the state: a number of 64 bits."""
        return int(self._get())

    def set_rng_state(self, state: int, device: Any = None) -> None:
        """Set the state."""
        self._set_to(state)


def _show_generator() -> None:
    if not hasattr(torch, "xla"):
        vars(torch)["xla"] = ShownGenerator(_xla_model().get_rng_state, _xla_model().set_rng_state)


def _torch_xla() -> Any:
    import torch_xla

    return torch_xla


def _xla_model() -> Any:
    from torch_xla.core import xla_model

    return xla_model


def _copied(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of ``tensors`` in host memory, which have no gradient."""
    return [copy.detach() for copy in XLA_COPIES(tensors)]


@cache
def _copies() -> DaemonThread:
    """The thread that copies to the host, in the order of the calls."""
    return DaemonThread("copies to the host")
