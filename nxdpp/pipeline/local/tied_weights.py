"""Tied weights: parameters of which several ranks hold a copy.

Copies start equal: the first owner sends its values to the others. Gradients are summed once a step.

Every copy except the first owner's has ``parameter.shared = True``, as in NeuronX Distributed. The norm of the whole
model's gradients counts such a parameter once, see ``nxdpp/gradients/gradient_norm.py``.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from nxdpp.agreement.same_values import Copy, hash_of_all
from nxdpp.devices.host_sends import Transfer
from nxdpp.devices.kinds import device_of
from nxdpp.gradients.gradient_dtype import gradient_dtype
from nxdpp.gradients.held_hooks import HeldHooks, count_hooks
from nxdpp.gradients.replaced_parameters import holders, options_text
from nxdpp.gradients.shards.local_tensors import local_rows, with_rows
from nxdpp.ground.torch_names import VERSION
from nxdpp.pipeline.p2p.layout import layout_of
from nxdpp.pipeline.p2p.transport import Direction, Transport, are_zeros, zeros_like
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.waits import Wait
from nxdpp.ranks.group_values import gather_values
from nxdpp.tracing.modules import listings

# Note: sums of ties
#
# In one process a tied weight has one gradient, to which embedding and head both add. Here each owner has a part of it,
# and the sum must be the same bits on every owner, or the copies go apart and nothing notices.
#
# - One rank adds. The others send their part to the first owner, which adds in the order of the ranks and sends the sum
#   back. An all-reduce would promise no order, and need a group for each set of owners.
# - Earlier gradients must not be summed again. A script that accumulates over two steps has G on each owner already:
#
#       before    rank 0: G         rank 3: G            (equal, from an earlier accumulation)
#       step      rank 0: a         rank 3: b
#       after     rank 0: G+(a+b)   rank 3: G+(a+b)
#
#   So `.grad` is set aside before the first backward and put back after the sum. A step that fails puts it back too.
# - No gradient is not a gradient of zeros: an optimizer skips None, and decays a weight with zeros. An owner without
#   one sends negative zeros, which change no sum. Only if all have sent these is `.grad` None.
# - A copy that is frozen on one rank takes part, as it may be trained on another.
# - A hook sees the whole gradient of a microbatch, as in one process, and may change it. Where a weight has hooks,
#   these are held back (`held_hooks`), and the owners add up microbatch by microbatch. So do several stages of one
#   rank.
# - A forward that changes its copy in place (`nn.Embedding(max_norm=...)`) would leave the others behind: the versions
#   of the copies are compared, and the step is refused.
#
# SUM_TIES is an action after the last backward of each owner. The average over replicas begins earlier, and so leaves
# these parameters to the end (`TiedWeights.parameters`).

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


class _SetAside(NamedTuple):
    """A copy in a step: its gradient and its version from before, and its hooks if it has any."""

    weight: TiedWeight
    parameter: nn.Parameter
    earlier: torch.Tensor | None
    version: int
    hooks: HeldHooks | None


class TiedWeights:
    """The tied weights of one rank.

    Args:
        module: has this rank's copies.
        weights: in the order of their numbers.
        rank: pipeline rank of this process.
        named_only: names of the weights in modules that only other ranks run.
        of_stages: names of the parameters that only this rank holds, and that several of its stages use.

    Attributes:
        parameters: those whose gradients in the present step are known after its last backward.
    """

    def __init__(
        self,
        module: nn.Module,
        weights: Sequence[TiedWeight],
        rank: int,
        named_only: Collection[str] = (),
        of_stages: Sequence[str] = (),
    ) -> None:
        self._module, self._rank, self._named_only = module, rank, named_only
        self._weights = list(weights)
        self._copies = [module.get_parameter(weight.name) for weight in weights]
        self._of_stages = [(name, module.get_parameter(name)) for name in of_stages]
        self.has_weights = bool(weights or of_stages)
        self._sends: list[tuple[Transfer, torch.Tensor]] = []
        self._set_aside: list[_SetAside] = []
        self.parameters: list[nn.Parameter] = []
        self._mark()

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
        for place, (weight, before) in enumerate(zip(self._weights, self._copies, strict=True)):
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
            all_names = dict.fromkeys((*weight.names, *names.get(id(now[name]), ())))
            self._weights[place] = replace(weight, name=name, names=tuple(all_names))
            self._copies[place] = now[name]
        self._of_stages = [(name, now.get(name, parameter)) for name, parameter in self._of_stages]
        self._mark()

    def hooks_after(self, heard: Mapping[int, int]) -> dict[int, int]:
        """Return how many hooks the gradient of each weight has, by its number; ``heard`` is from the ranks before.

        Raises ``RuntimeError`` for a weight that has other hooks here: the owners would not exchange the same.
        """
        counts = {}
        for weight, parameter in zip(self._weights, self._copies, strict=True):
            counts[weight.number] = count = count_hooks(parameter)
            theirs = heard.get(weight.number, 0)
            if self._rank != weight.ranks[0] and count != theirs:
                raise RuntimeError(
                    f"{weight.names[0]} is tied over the pipeline ranks {list(weight.ranks)}, and its gradient has "
                    f"{theirs} hooks on rank {weight.ranks[0]} and {count} on rank {self._rank}: the copies would go "
                    f"apart. Register each hook on every rank, on the parameters of model.named_parameters()."
                )
        return {**heard, **{number: count for number, count in counts.items() if count}}

    def set_aside(self) -> None:
        """Take earlier gradients out of ``.grad``, and the hooks away, before the step's first backward."""
        here = [(TiedWeight(n, (n,), (self._rank,), -1), p) for n, p in self._of_stages if count_hooks(p)]
        for weight, parameter in (*zip(self._weights, self._copies, strict=True), *here):
            hooks = HeldHooks(parameter) if count_hooks(parameter) else None
            self._set_aside.append(_SetAside(weight, parameter, parameter.grad, VERSION.of(parameter), hooks))
            parameter.grad = None
        self.parameters = [each.parameter for each in self._set_aside]

    def put_back(self) -> None:
        """Undo ``set_aside``, in a step that has failed."""
        for _, parameter, earlier, _, hooks in self._set_aside:
            if hooks is not None:
                hooks.put_back()
            parameter.grad = earlier
        self._set_aside = []

    def add_up(self, transport: Transport, microbatches: Sequence[int]) -> None:
        """Give every owner the sum of all owners' gradients, in the order of the ranks; after the last backward.

        Collective over the owners of each weight. ``microbatches`` has the microbatch of each action of the step.
        Raises ``RuntimeError`` if a forward of this rank has changed a copy.
        """
        for weight, parameter, _, version, _ in self._set_aside:
            if len(weight.ranks) > 1 and VERSION.of(parameter) != version:
                raise RuntimeError(
                    f"{weight.name} is tied over the pipeline ranks {list(weight.ranks)}, and a forward of rank "
                    f"{self._rank} has changed its copy in place (nn.Embedding(max_norm=...) does): the other ranks "
                    f"have used the old values. Change it between steps, on every rank, or untie it before wrapping."
                )
        for weight, parameter, earlier, _, hooks in self._set_aside:
            if hooks is not None:
                hooks.run(microbatches, earlier, partial(self._whole, parameter, weight, transport))
                continue
            # A copy that is frozen here may be trained elsewhere: every owner takes part.
            total = self._sum(parameter.grad, parameter, weight, transport)
            if parameter.requires_grad:
                # No owner has a gradient if all have sent negative zeros.
                parameter.grad = None if parameter.grad is None and are_zeros(local_rows(total)) else total
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        self._finish_sends()
        self._set_aside = []

    def _whole(
        self, parameter: nn.Parameter, weight: TiedWeight, transport: Transport, own: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Sum the owners' gradients of one microbatch; ``None`` where no owner has one."""
        total = self._sum(own, parameter, weight, transport)
        # A hook may change it in place.
        self._finish_sends()
        return None if own is None and are_zeros(total) else total

    def _finish_sends(self) -> None:
        with Wait("gradients of tied weights"):
            while self._sends:
                self._sends.pop()[0].wait()

    def _mark(self) -> None:
        """Set ``shared`` of each copy, ``True`` except on the first owner: norms and counts take a weight once."""
        for weight, parameter in zip(self._weights, self._copies, strict=True):
            parameter.shared = self._rank != weight.ranks[0]  # type: ignore[attr-defined]  # nxdpp's own attribute of a tensor

    def _sum(
        self, own: torch.Tensor | None, parameter: nn.Parameter, weight: TiedWeight, transport: Transport
    ) -> torch.Tensor:
        """Sum the owners' gradients, of the shape of ``parameter``: ``(V, H)`` for an embedding of V tokens.

        Owners of a sharded parameter have the same rows of it, and sum these where they are, as in host memory.
        """
        rows = local_rows(parameter)
        own = zeros_like(rows, gradient_dtype(parameter)) if own is None else local_rows(own)
        (layout,) = layout_of(own).tensors
        own = layout.arrange(own)
        first, *others = weight.ranks
        # The first owner adds up and sends the sum back, so that all copies get the same bits.
        if self._rank != first:
            self._sends.append(transport.send(own, first, Direction.GRADIENT, weight.number))
            receive = transport.post_receive(layout, first, Direction.ACTIVATION, weight.number)
            return with_rows(parameter, receive().to(own.device))
        for receive in [transport.post_receive(layout, rank, Direction.GRADIENT, weight.number) for rank in others]:
            own = own + receive().to(own.device)
        self._sends += [transport.send(own, rank, Direction.ACTIVATION, weight.number) for rank in others]
        return with_rows(parameter, own)

    def copies(self) -> dict[int, Copy]:
        """This rank's copy of each weight, by its number."""
        return {
            weight.number: Copy(
                self._rank,
                weight.name,
                str(parameter.dtype),
                tuple(parameter.shape),
                hash_of_all(local_rows(parameter)),
                parameter.requires_grad,
                _optimizers_of(parameter),
            )
            for weight, parameter in zip(self._weights, self._copies, strict=True)
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
        weights = list(zip(self._weights, self._copies, strict=True))
        with failure_watch.reported():
            own = {w.number: (w.name, str(p.dtype), tuple(p.shape)) for w, p in weights}
            everyones = gather_values(own, group)
        # All ranks raise here or none does, so no rank is left waiting.
        _check_alike(everyones)
        with failure_watch.reported():
            for weight, parameter in weights:
                _send_values(parameter, weight, transport, self._rank)


def _are_untied(weight: TiedWeight, now: Mapping[str, nn.Parameter]) -> bool:
    return len({id(now[name]) for name in weight.names if name in now}) > 1


def _optimizers_of(parameter: nn.Parameter) -> str:
    """The live optimizers that hold ``parameter``, with the options of its group."""
    texts = []
    for optimizer, _ in holders({"": parameter}):
        (group,) = (each for each in optimizer.param_groups if any(held is parameter for held in each["params"]))
        texts.append(options_text(optimizer, group))
    return "; ".join(sorted(texts)) or "none"


def _check_alike(everyones: Sequence[Mapping[int, tuple[str, str, tuple[int, ...]]]]) -> None:
    known: dict[int, tuple[int, tuple[str, str, tuple[int, ...]]]] = {}
    for rank, copies in enumerate(everyones):
        for number, copy in copies.items():
            first, theirs = known.setdefault(number, (rank, copy))
            if copy[1:] != theirs[1:]:
                (name, dtype, shape), (its_name, its_dtype, its_shape) = copy, theirs
                raise RuntimeError(
                    f"a tied weight is {its_dtype} of {list(its_shape)} on pipeline rank {first} ({its_name}) and "
                    f"{dtype} of {list(shape)} on pipeline rank {rank} ({name}). Apply the same change on every rank."
                )


def _send_values(parameter: nn.Parameter, weight: TiedWeight, transport: Transport, rank: int) -> None:
    first, *others = weight.ranks
    own = local_rows(parameter.detach())
    values = own.contiguous()
    # Each piece of a lazy device would be a graph of its own.
    is_whole = device_of(values.device).is_lazy
    for piece in [values] if is_whole else values.view(-1).split(max(1, _PIECE_BYTES // values.element_size())):
        if rank == first:
            works = [transport.send(piece, other, Direction.ACTIVATION, weight.number) for other in others]
            with Wait(f"values of {weight.name}"):
                for work, _ in works:
                    work.wait()
        else:
            (layout,) = layout_of(piece).tensors
            piece.copy_(transport.post_receive(layout, first, Direction.ACTIVATION, weight.number)())
    if rank != first and not own.is_contiguous():
        own.copy_(values)
