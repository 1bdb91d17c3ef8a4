"""Verification of the parameters of which each tensor-parallel rank has a copy: norms, and biases behind a sum.

No message makes the copies equal: they start equal, and get equal gradients::

    values       before the first step, and after a load             a sample of their bits
    gradients    as the optimizer gets them, steps 1, 2, 4, 8 ...    norms, compared in a later training step

The optimizer's step itself sends nothing, so ranks that step different optimizers do not wait for each other.
"""

import math
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from nxdpp.agreement.comparison import unequal
from nxdpp.agreement.fingerprint import digest
from nxdpp.agreement.same_values import sample
from nxdpp.counted import counted
from nxdpp.devices.kinds import device_of
from nxdpp.gradients.shards.local_tensors import local_rows
from nxdpp.gradients.step_hooks import run_before_steps_of
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.group_values import extremes
from nxdpp.tensor.tensor_attributes import is_tensor_parallel

# Relative differences of norms. On the CPU copies have equal bits; other devices may add up in any order.
_ON_CPU, _ELSEWHERE, _IN_HALF = 1e-5, 1e-3, 2e-2
# A gradient that is only rounding differs on each rank. It is this much smaller than the largest.
_NOISE = 1e-2
_made: list["weakref.ref[TensorCopies]"] = []
_MISSING, _NOT_FINITE = -1.0, torch.finfo(torch.float64).max


class TensorCopies:
    """The copies that this rank has of the whole parameters of ``module``, the local modules."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._steps = 0
        self._is_changed = True
        self._optimizer_steps: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._norms: WeakIdKeyDictionary = WeakIdKeyDictionary()
        if parallel_state.get_tensor_model_parallel_size() > 1:
            run_before_steps_of(self, TensorCopies.note)
            _made.append(weakref.ref(self, _made.remove))

    def verify_again(self) -> None:
        """Verify the values again in one of the next steps."""
        self._is_changed = True

    def verify(self, seed: int) -> None:
        """Verify values and noted gradients, in the steps that have it; collective over the tensor group.

        ``seed`` is ``torch.initial_seed()`` when this rank wrapped the model, for the message. Raises ``RuntimeError``
        on all ranks of the group for a difference.
        """
        if parallel_state.get_tensor_model_parallel_size() == 1:
            return
        self._steps += 1
        # Steps 1, 2, 3, 5, 9 ...: one after each optimizer step that may be noted.
        before = self._steps - 1
        if before & (before - 1):
            return
        with failure_watch.reported():
            if any(extremes([self._is_changed], parallel_state.get_tensor_control_group())[1]):
                self.check_values(seed)
                self._is_changed = False
            self.check_gradients()

    def has_any_of(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Return whether one of ``parameters`` is such a copy."""
        own = {id(parameter) for parameter in self._copies().values()}
        return any(id(parameter) in own for parameter in parameters)

    def check_values(self, seed: int) -> None:
        """Compare the names, shapes, dtypes and a sample of the values of the copies; as ``verify``, in any step."""
        group = parallel_state.get_tensor_control_group()
        own = {name: (str(p.dtype), tuple(p.shape), sample(local_rows(p)).hex()) for name, p in self._copies().items()}
        smallest, largest = extremes([int.from_bytes(digest(repr(own).encode()), "little") >> 12], group)
        if smallest != largest:
            raise RuntimeError(_unequal_values(own, seed, group))

    def check_gradients(self) -> None:
        """Compare the noted norms; as ``verify``, in any step."""
        copies = self._copies()
        noted = [float(self._norms.get(parameter, _MISSING)) for parameter in copies.values()]
        # A norm that is not finite is so on all ranks, or differs from every number.
        own = [norm if math.isfinite(norm) else _NOT_FINITE for norm in noted]
        smallest, largest = extremes(own, parallel_state.get_tensor_control_group(), dtype=torch.float64)
        floor = _NOISE * max((norm for norm in largest if norm < _NOT_FINITE), default=0.0)
        different = [
            (name, low, high)
            for (name, parameter), low, high in zip(copies.items(), smallest, largest, strict=True)
            if high - low > _tolerance(parameter) * max(high, floor, 0.0)
        ]
        if different:
            raise RuntimeError(_unequal_gradients(different, len(copies)))

    def note(self, optimizer: Optimizer) -> None:
        """Note the norms of the gradients that ``optimizer`` is about to use; sends nothing."""
        copies = {id(parameter) for parameter in self._copies().values()}
        stepped = [p for group in optimizer.param_groups for p in group["params"] if id(p) in copies]
        if not stepped:
            return
        # The norms are a graph of their own on a lazy device: the optimizer's step is one graph, with and without them.
        device = device_of(stepped[0].device)
        device.submit()
        number = self._optimizer_steps.get(optimizer, 0) + 1
        self._optimizer_steps[optimizer] = number
        if number & (number - 1):
            return
        with torch.no_grad():
            for parameter in stepped:
                gradient = parameter.grad
                if gradient is None:
                    self._norms[parameter] = torch.full((), _MISSING, dtype=torch.float64, device="cpu")
                elif gradient.layout == torch.strided:
                    dtype = torch.promote_types(gradient.dtype, torch.float32)
                    self._norms[parameter] = torch.linalg.vector_norm(local_rows(gradient), dtype=dtype).double()
        device.submit()

    def _copies(self) -> dict[str, nn.Parameter]:
        named = self._module.named_parameters()
        return {name: p for name, p in named if not is_tensor_parallel(p) and not p.is_meta}


def compare_tensor_copies(module: nn.Module) -> None:
    """Make calls of ``module`` with gradients compare its copies; for a loop of ``backward()`` without ``run_train``.

    Call it after ``tensor_parallelize``. Calls 1, 2, 3, 5, 9 and so on are collective over the tensor group, and raise
    ``RuntimeError`` on all its ranks for a difference. Parameters on the meta device are left out.
    """
    if parallel_state.get_tensor_model_parallel_size() == 1:
        return
    copies, seed = TensorCopies(module), torch.initial_seed()

    def verify(_: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            copies.verify(seed)

    module.register_forward_pre_hook(verify)


def copies_among(parameters: Iterable[nn.Parameter]) -> list[TensorCopies]:
    """Return the copies in use that have one of ``parameters``, in the order in which they were made."""
    given = list(parameters)
    alive = [reference() for reference in _made]
    return [each for each in alive if each is not None and each.has_any_of(given)]


def _tolerance(parameter: torch.Tensor) -> float:
    if parameter.dtype.itemsize < torch.float32.itemsize:
        return _IN_HALF
    return _ON_CPU if parameter.device.type == "cpu" else _ELSEWHERE


def _unequal_values(own: Mapping[str, Any], seed: int, group: dist.ProcessGroup) -> str:
    found = unequal(own, group, note=seed)
    assert found is not None, "the hashes differ"
    there, here = found.values
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    first, other = found.names("tensor rank")
    first_seed, other_seed = found.notes
    return (
        f"{other} has other values than {first} in {len(names)} of {counted(len(there), 'parameter')} of which each "
        f"tensor rank has a copy; the first is {names[0]}. torch.initial_seed() was {first_seed} and {other_seed} when "
        "they wrapped the model. Give torch.manual_seed the same seed on the ranks of a tensor group before the model "
        f"is built, and load the same checkpoint. {_DIVIDED}"
    )


_DIVIDED = (
    "A parameter that the model divides by itself is marked by "
    "parallel_layers.utils.set_tensor_model_parallel_attributes(parameter, True, dim)."
)


def _unequal_gradients(different: list[tuple[str, float, float]], copies: int) -> str:
    name, low, high = different[0]
    norms = "no gradient on one and a gradient on another" if low == _MISSING else f"norms {low:.6g} and {high:.6g}"
    return (
        f"each tensor rank has a copy of {name}, and an optimizer stepped it with other gradients on the ranks "
        f"({norms}); copies that differ, and go apart: {len(different)} of {copies}. The likely reasons: "
        f"torch.nn.utils.clip_grad_norm_ clips by the norm of one rank: use model.clip_grad_norm_(max_norm), or "
        f"nxdpp.parallel_layers.clip_grad_norm(parameters, max_norm). torch's GradScaler decides on each rank alone: "
        f"use nxdpp.GradScaler. The ranks of a tensor group have another seed for dropout: give them the same. A norm "
        f"between sequence-parallel layers "
        f"is not marked: parallel_layers.layer_norm.LayerNorm(..., sequence_parallel_enabled=True), or set "
        f"parameter.sequence_parallel_enabled = True before wrapping. run_train sums gradients of marked ones; a loop "
        f"of backward() needs neuronx_distributed_config(sequence_parallel=True). {_DIVIDED}"
    )
