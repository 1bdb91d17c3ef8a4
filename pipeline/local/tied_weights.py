"""Tied weights: parameters of which several ranks hold a copy.

Copies start equal: the first owner sends its values to the others. Gradients are summed once a step. Each owner adds
only the contributions of the step to ``.grad``. Earlier, summed gradients are set aside and put back::

    before    rank 0: G         rank 3: G            (equal, from an earlier accumulation)
    step      rank 0: a         rank 3: b
    after     rank 0: G+(a+b)   rank 3: G+(a+b)

Every copy except the first owner's has ``parameter.shared = True``, as in NeuronX Distributed. The norm of the whole
model's gradients counts such a parameter once, see ``nxdpp/gradients/gradient_norm.py``.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from nxdpp.agreement.same_values import Copy, sample_and_sum
from nxdpp.devices.host_sends import Transfer
from nxdpp.devices.kinds import device_of
from nxdpp.gradients.gradient_dtype import gradient_dtype
from nxdpp.gradients.replaced_parameters import holders
from nxdpp.pipeline.p2p.layout import layout_of
from nxdpp.pipeline.p2p.transport import Direction, Transport, are_zeros, zeros_like
from nxdpp.ranks.faults import failure_watch
from nxdpp.tracing.modules import listings

# Entries of a group of an optimizer that differ between the ranks of one script.
_NO_OPTIONS = ("params", "param_names")

# Copies are sent in pieces of this size, so that no rank needs memory for a second copy.
_PIECE_BYTES = 32 * 2**20


@dataclass(frozen=True)
class TiedWeight:
    """A parameter of this rank, of which other ranks hold copies.

    A stage of this rank uses it under ``name``; ``names`` are all its names when the model was wrapped. ``ranks`` are
    its owners in ascending order, this rank included. ``number`` identifies the weight on all ranks.
    """

    name: str
    names: tuple[str, ...]
    ranks: tuple[int, ...]
    number: int


class TiedWeights:
    """The tied weights of one rank.

    Args:
        module: has this rank's copies.
        weights: in the order of their numbers.
        rank: pipeline rank of this process.
        named_only: names of the weights in modules that only other ranks run.
    """

    def __init__(
        self, module: nn.Module, weights: Sequence[TiedWeight], rank: int, named_only: Collection[str] = ()
    ) -> None:
        self._module = module
        self._weights = list(weights)
        self._parameters = [module.get_parameter(weight.name) for weight in weights]
        self._rank = rank
        self._named_only = named_only
        self._sends: list[tuple[Transfer, torch.Tensor]] = []
        self._accumulated: list[torch.Tensor | None] = []
        self._hooks: list[Any] = []
        self._versions: list[int] = []
        self._mark()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """This rank's copies."""
        return list(self._parameters)

    @property
    def names(self) -> list[tuple[str, ...]]:
        """All names of each weight when the model was wrapped."""
        return [weight.names for weight in self._weights]

    def are_untied(self) -> bool:
        """Return whether names of a weight have different parameters, as between the lines that replace them."""
        now = dict(listings.named_parameters(self._module, remove_duplicate=False))
        return any(_are_untied(weight, now) for weight in self._weights)

    def follow(self) -> None:
        """Find the parameters again after a replacement.

        A parameter that has moved to another name (``lm_head.base.weight``) keeps its ties. A replaced parameter
        passes its ties on to the parameter that has its name now.

        Raises:
            RuntimeError: for a parameter that was removed, or replaced by one of another shape or under some names.
        """
        now = dict(listings.named_parameters(self._module, remove_duplicate=False))
        names: dict[int, list[str]] = {}
        for name, parameter in now.items():
            names.setdefault(id(parameter), []).append(name)
        for place, (weight, before) in enumerate(zip(self._weights, self._parameters, strict=True)):
            same = [each for each in names.get(id(before), ()) if each not in self._named_only]
            name = weight.name if weight.name in same or not same else same[0]
            if name not in now or now[name].shape != before.shape:
                found = f"replaced by one of {list(now[name].shape)}" if name in now else "taken away"
                raise RuntimeError(
                    f"{weight.name}, of shape {list(before.shape)}, is tied over the pipeline ranks "
                    f"{list(weight.ranks)} and was {found} on rank {self._rank}. Keep the parameter, or put one of the "
                    f"same shape in its place."
                )
            if _are_untied(weight, now):
                raise RuntimeError(
                    f"{' and '.join(weight.names)} were one parameter when the model was wrapped, and are different "
                    f"ones now on rank {self._rank}: a tie over the pipeline ranks {list(weight.ranks)} cannot be "
                    f"undone. Untie the model before it is wrapped, or put one parameter under all these names."
                )
            self._weights[place] = replace(weight, name=name)
            self._parameters[place] = now[name]
        self._mark()

    def set_aside(self) -> None:
        """Take earlier gradients out of ``.grad``, before the step's first backward; on every rank.

        Hooks of a gradient (``register_hook``) are set aside too: each rank has a part of it until ``add_up``.
        """
        if not self._parameters:
            return
        self._accumulated = [parameter.grad for parameter in self._parameters]
        self._hooks = [parameter._backward_hooks for parameter in self._parameters]
        self._versions = [parameter._version for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
            if parameter._backward_hooks:
                parameter._backward_hooks = None

    def add_up(self, transport: Transport) -> None:
        """Give every owner the sum of all owners' gradients, in the order of the ranks; after the last backward.

        Collective over the owners of each weight. Raises ``RuntimeError`` if a forward of this rank has changed a copy.
        """
        for weight, parameter, version in zip(self._weights, self._parameters, self._versions, strict=True):
            if parameter._version != version:
                raise RuntimeError(
                    f"{weight.name} is tied over the pipeline ranks {list(weight.ranks)}, and a forward of rank "
                    f"{self._rank} has changed its copy in place (nn.Embedding(max_norm=...) does): the other ranks "
                    f"have used the old values. Change it between steps, on every rank, or untie it before wrapping."
                )
        pairs = zip(self._weights, self._parameters, self._accumulated, self._hooks, strict=True)
        for weight, parameter, earlier, hooks in pairs:
            # A copy that is frozen here may be trained elsewhere: every owner takes part.
            total = self._sum(parameter, weight, transport)
            if hooks:
                parameter._backward_hooks = hooks
            if parameter.requires_grad:
                # No owner has a gradient if all have sent negative zeros.
                is_missing = parameter.grad is None and are_zeros(total)
                parameter.grad = None if is_missing else _hooked(total, hooks)
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        while self._sends:
            self._sends.pop()[0].wait()
        self._accumulated, self._hooks = [], []

    def _mark(self) -> None:
        """Set ``shared`` of each copy, ``True`` except on the first owner: norms and counts take a weight once."""
        for weight, parameter in zip(self._weights, self._parameters, strict=True):
            parameter.shared = self._rank != weight.ranks[0]  # type: ignore[attr-defined]  # an attribute of ours on a tensor

    def _sum(self, parameter: nn.Parameter, weight: TiedWeight, transport: Transport) -> torch.Tensor:
        """Sum the owners' gradients, of the shape of ``parameter``: ``(V, H)`` for an embedding of V tokens."""
        own = parameter.grad if parameter.grad is not None else zeros_like(parameter, gradient_dtype(parameter))
        (layout,) = layout_of(own).tensors
        own = layout.arrange(own)
        first, *others = weight.ranks
        # The first owner adds up and sends the sum back, so that all copies get the same bits.
        if self._rank != first:
            self._sends.append(transport.send(own, first, Direction.GRADIENT, weight.number))
            return transport.post_receive(layout, first, Direction.ACTIVATION, weight.number)()
        contributions = [transport.post_receive(layout, rank, Direction.GRADIENT, weight.number) for rank in others]
        for contribution in contributions:
            own = own + contribution()
        self._sends += [transport.send(own, rank, Direction.ACTIVATION, weight.number) for rank in others]
        return own

    def copies(self) -> dict[int, Copy]:
        """This rank's copy of each weight, by its number."""
        return {
            weight.number: Copy(
                self._rank,
                weight.name,
                str(parameter.dtype),
                tuple(parameter.shape),
                sample_and_sum(parameter),
                parameter.requires_grad,
                _optimizers_of(parameter),
            )
            for weight, parameter in zip(self._weights, self._parameters, strict=True)
        }

    def make_equal(self, transport: Transport, group: dist.ProcessGroup) -> None:
        """Give every owner of each weight the values of its first owner; collective over the pipeline.

        Values are sent even where copies are equal: comparing hashes first takes as long. gloo sends 1.5 to 1.8 GB/s
        between processes of one machine. A shared core reads 0.7 to 0.8 GB/s into SHA-256.

        Args:
            transport: for the device of the copies.
            group: the ranks of the pipeline, for CPU tensors.

        Raises:
            RuntimeError: on all ranks, where copies of a weight have different shapes or dtypes.
        """
        everyones: list[Any] = [None] * dist.get_world_size(group)
        weights = list(zip(self._weights, self._parameters, strict=True))
        with failure_watch.reported():
            own = {w.number: _Copy(w.name, str(p.dtype), tuple(p.shape)) for w, p in weights}
            dist.all_gather_object(everyones, own, group=group)
        # All ranks raise here or none does, so no rank is left waiting.
        _check_alike(everyones)
        with failure_watch.reported():
            for weight, parameter in weights:
                _send(parameter, weight, transport, self._rank)


def _are_untied(weight: TiedWeight, now: Mapping[str, nn.Parameter]) -> bool:
    return len({id(now[name]) for name in weight.names if name in now}) > 1


def _hooked(gradient: torch.Tensor, hooks: Mapping[int, Callable[..., Any]] | None) -> torch.Tensor:
    """Return ``gradient`` after ``hooks`` of its parameter, each of which may return another one."""
    for hook in (hooks or {}).values():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def _optimizers_of(parameter: nn.Parameter) -> str:
    """The live optimizers that hold ``parameter``, with the options of its group."""
    texts = []
    for optimizer, _ in holders({"": parameter}):
        (group,) = (each for each in optimizer.param_groups if any(held is parameter for held in each["params"]))
        options = ", ".join(f"{name}={value}" for name, value in sorted(group.items()) if name not in _NO_OPTIONS)
        texts.append(f"{type(optimizer).__name__}({options})")
    return "; ".join(sorted(texts)) or "none"


class _Copy(NamedTuple):
    """Description of a rank's copy that all ranks compare."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def _check_alike(everyones: Sequence[Mapping[int, _Copy]]) -> None:
    known: dict[int, tuple[int, _Copy]] = {}
    for rank, copies in enumerate(everyones):
        for number, copy in copies.items():
            first, theirs = known.setdefault(number, (rank, copy))
            if copy[1:] != theirs[1:]:
                raise RuntimeError(
                    f"a tied weight is {theirs.dtype} of {list(theirs.shape)} on pipeline rank "
                    f"{first} ({theirs.name}) and {copy.dtype} of {list(copy.shape)} on pipeline rank {rank} "
                    f"({copy.name}). Apply the same change on every rank."
                )


def _send(parameter: nn.Parameter, weight: TiedWeight, transport: Transport, rank: int) -> None:
    first, *others = weight.ranks
    values = parameter.detach().contiguous()
    # Each piece of a lazy device would be a graph of its own.
    is_whole = device_of(values.device).is_lazy
    for piece in [values] if is_whole else values.view(-1).split(max(1, _PIECE_BYTES // values.element_size())):
        if rank == first:
            for work, _ in [transport.send(piece, other, Direction.ACTIVATION, weight.number) for other in others]:
                work.wait()
        else:
            (layout,) = layout_of(piece).tensors
            piece.copy_(transport.post_receive(layout, first, Direction.ACTIVATION, weight.number)())
    if rank != first and not parameter.is_contiguous():
        parameter.detach().copy_(values)
