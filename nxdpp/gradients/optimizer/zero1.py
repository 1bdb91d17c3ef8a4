"""Zero1Optimizer: an elementwise optimizer whose state is sharded over the data-parallel ranks (ZeRO, stage 1).

::

    gradients of this rank ─ reduce-scatter ─▶ averaged gradient of its pieces ─ clip ─▶ base_optimizer.step()
    parameters             ◀─ all-gather ───── its pieces                      ◀─────────┘

The method comes from "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (Rajbhandari et al., 2019).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nxdpp.devices.kinds import device_of
from nxdpp.gradients.buckets import Hook
from nxdpp.gradients.gradient_dtype import accumulate_in
from nxdpp.gradients.optimizer import zero1_checks, zero1_state
from nxdpp.gradients.optimizer.sent_messages import watch_steps
from nxdpp.gradients.optimizer.sharded_bucket import ShardedPiece, Sharding
from nxdpp.gradients.optimizer.sharded_parameters import ShardedParameters
from nxdpp.gradients.optimizer.step_reduction import ReplicaPosition, StepReduction, hash_of_options, present_anywhere
from nxdpp.gradients.optimizer.zero1_checks import check_elementwise
from nxdpp.gradients.state_part import is_divided, part_of_optimizer
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.board import board


class Zero1Optimizer(Optimizer):
    """An elementwise optimizer over the data-parallel ranks, each of which keeps an equal part of the state.

    ``step`` averages the gradients over the data-parallel ranks, so the model leaves that to it
    (``use_zero1_optimizer=True``). Gradients that are averaged already stay as they are: the mean of equal numbers is
    that number, at the cost of a second message. With ``reduction="sum"`` they must be each rank's own.
    ``.grad`` of a parameter stays the gradient of this rank, unless ``whole_gradients`` is set.

    A program may take a step in parts: ``reduce_gradients``, then ``scale_gradients``, ``gradient_norm`` or
    ``clip_gradients``, then ``step``.

    ``param_groups`` has the parameters and their options; learning-rate schedulers and ``add_param_group`` work on it.
    Every replica makes it with the same parameters, after the model is moved and loaded.

    Args:
        params: parameters, groups of them, or pairs of name and parameter. Those that require or have a gradient are
            sharded.
        optimizer_class: class of an elementwise optimizer, such as ``torch.optim.AdamW``.
        optimizer_dtype: of the values and state; by default float32 for half parameters, else the parameter's dtype.
        grad_clipping: clip the gradients by their norm over all ranks, each parameter counted once.
        max_norm: largest norm.
        bucket_cap_mb: largest size of a message, in MiB.
        accumulated_dtype: of ``.grad``, such as float32 for half parameters. It has effect where it has more bits than
            the parameter, and then needs torch 2.10. By default the parameter's dtype.
        averaged_dtype: of the messages with gradients, likewise. By default the dtype of ``.grad``.
        sharding_groups: number of groups of replicas. Each group has the whole state, and sends parameters inside it.
            Only 1 with experts over ranks, whose state is divided over the ranks with the same experts.
        whole_gradients: give ``.grad`` the result too, which stays there until it is removed. A program may change it
            in place before the step, on all replicas alike. It takes an all-reduce in place of a reduce-scatter.
        reduction: ``"mean"``, or ``"sum"`` for the sum of the gradients over the data-parallel ranks.
        optimizer_defaults: options of ``optimizer_class``.

    Attributes:
        base_optimizer: of ``optimizer_class``, over this rank's pieces.
        grad_norm: the norm before clipping in the last step, of shape (); ``None`` before, and without clipping.

    Raises:
        TypeError, ValueError: for an optimizer that is not elementwise, and for options that it refuses.
        RuntimeError: before ``initialize_model_parallel``, for parameters on the meta device, and with
            ``accumulated_dtype`` for parameters that have a gradient.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        optimizer_dtype: torch.dtype | None = None,
        grad_clipping: bool = True,
        max_norm: float | None = 1.0,
        bucket_cap_mb: float = 25.0,
        accumulated_dtype: torch.dtype | None = None,
        averaged_dtype: torch.dtype | None = None,
        reduction: str = "mean",
        sharding_groups: int = 1,
        whole_gradients: bool = False,
        **optimizer_defaults: Any,
    ) -> None:
        zero1_checks.check_dtypes(
            optimizer_dtype=optimizer_dtype, accumulated_dtype=accumulated_dtype, averaged_dtype=averaged_dtype
        )
        zero1_checks.check_reduction(reduction)
        max_norm = zero1_checks.checked_norm(1.0 if max_norm is None else max_norm)
        if not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb must be above 0, not {bucket_cap_mb}.")
        device = parallel_state.local_device()
        # On a lazy device each step of the check would be a graph.
        checked_on = torch.device("cpu") if device_of(device).is_lazy else device
        options = check_elementwise(optimizer_class, optimizer_defaults, checked_on)
        self.grad_clipping = grad_clipping
        self.max_norm = max_norm
        self.grad_norm: torch.Tensor | None = None
        rank, size, group, everyone = Sharding.ranks_of(sharding_groups)
        dtypes, mean = (optimizer_dtype, accumulated_dtype, averaged_dtype), reduction == "mean"
        self._sharding = Sharding(rank, size, group, *dtypes, mean, sharding_groups, everyone, whole_gradients)
        self._reduction = StepReduction(self._sharding)
        self._sharded = ShardedParameters(self._sharding, int(bucket_cap_mb * 2**20))
        self._steps = 0
        self._is_made = False
        super().__init__(params, options)
        zero1_checks.refuse_meta(parameter for group in self.param_groups for parameter in group["params"])
        self._sharded.add(self.param_groups)
        self.base_optimizer = optimizer_class(self._sharded.groups_of_pieces(self.param_groups), **optimizer_defaults)
        # Pieces at the same place of the lists of two replicas are different ones.
        watch_steps(self.base_optimizer)
        # The state belongs to the pieces.
        self.state = self.base_optimizer.state
        self._is_made = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, on all replicas alike; not collective."""
        super().add_param_group(param_group)
        try:
            self._prepare(self.param_groups[-1]["params"])
        except Exception:
            self.param_groups.pop()
            raise
        if self._is_made:
            self.base_optimizer.add_param_group({**zero1_state.options_of(self.param_groups[-1]), "params": []})
            self._add_members()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients unless ``reduce_gradients`` has, clip them, step this rank's pieces, gather parameters.

        Collective over all ranks. A gradient that is missing on some replicas counts as zeros there; parameters
        without a gradient on all replicas stay as they are. Returns what ``closure`` returns.

        Raises:
            RuntimeError: where replicas are in different steps, or have other parameters or options, before anything is
                changed. Also for gradients that were replaced, or without ``whole_gradients`` changed, since
                ``reduce_gradients``.
            ValueError: for sparse gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parallel_state.refuse_in_debug("a step of Zero1Optimizer")
        zero1_checks.refuse_sparse(parameter for group in self.param_groups for parameter in group["params"])
        with board.call("Zero1Optimizer.step", has_limit=True), failure_watch.reported(), torch.no_grad():
            self._step()
        return loss

    def reduce_gradients(self, before: Sequence[Hook] = (), after: Sequence[Hook] = ()) -> None:
        """Average or sum the gradients over the data-parallel ranks before the step; collective over all ranks.

        Each rank gets the result of its own pieces. Nothing happens if this is done already: until ``step``, until
        ``zero_grad``, or until all gradients are other tensors on all ranks, with ``whole_gradients`` from a backward.
        Between this and the step, a backward that adds to a gradient raises ``RuntimeError``.

        Args:
            before: functions of a flat bucket of this rank's gradients, of shape (elements,), which change it in place.
                They run in their order, before the division of an average.
            after: functions of this rank's part of the flat bucket of the result, likewise. With ``whole_gradients`` of
                all of it.

        Raises as ``step`` does.
        """
        parallel_state.refuse_in_debug("a step of Zero1Optimizer")
        zero1_checks.refuse_sparse(parameter for group in self.param_groups for parameter in group["params"])
        with board.call("Zero1Optimizer.reduce_gradients", has_limit=True), failure_watch.reported(), torch.no_grad():
            if not self._reduction.is_done():
                self._reduce(before, after)
                self._mark()

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply the reduced gradients by ``factor``, a number equal on all ranks; not collective.

        Raises ``RuntimeError`` before ``reduce_gradients``, and for gradients that were changed since, as ``step``.
        """
        self._reduction.scale(factor)

    def gradient_norm(self) -> torch.Tensor:
        """Return the norm of the reduced gradients of the whole model; collective over all ranks.

        Returns a float32 tensor of shape (), equal on all ranks. Raises ``RuntimeError`` before ``reduce_gradients``.
        """
        return self._clip(math.inf)

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Scale the reduced gradients so that their norm is ``max_norm`` at most; collective over all ranks.

        Returns the norm before, as ``gradient_norm`` does. ``step`` clips again if ``grad_clipping`` is set.

        Raises ``RuntimeError`` before ``reduce_gradients``, and ``ValueError`` for ``max_norm`` of 0 or less.
        """
        return self._clip(zero1_checks.checked_norm(max_norm))

    def holding_gradients(self) -> Optimizer:
        """Return the optimizer whose parameters have the gradients of the next step; collective over the replicas.

        That is ``base_optimizer`` after ``reduce_gradients``, unless ``.grad`` has the result. Raises as ``step`` does.
        """
        is_in_pieces = not self._sharding.whole and self._reduction.is_done()
        return self.base_optimizer if is_in_pieces else self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free or zero all gradients, reduced ones too."""
        super().zero_grad(set_to_none)
        self._reduction.end()

    def shards(self) -> Iterator[tuple[zero1_state.ParameterShard, nn.Parameter, dict[str, Any]]]:
        """Give each part of a parameter that this rank keeps, its values, and its state; not collective.

        Parameters that require or have a gradient since the last step have parts too.
        """
        self._add_members()
        for piece in self._ordered():
            yield zero1_state.shard_of(piece), piece.tensor, self.base_optimizer.state.get(piece.tensor, {})

    def sharded_parameters(self) -> list[nn.Parameter]:
        """The parameters that are divided over the replicas, also where this one keeps no part; not collective."""
        self._add_members()
        return [member.parameter for member in self._sharded.sharded()]

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state; not collective.

        ``state`` has the state of each shard by number, ``shards`` describes them, ``masters`` has their values where
        these are not views of parameters. ``param_groups`` has the options, with indices of the parameters. Pickles of
        it are refused, but where this rank has the whole; ``dict(state)`` is for a file of each rank.
        """
        sharded = self._ordered(), self._sharded.buckets, self._sharded.members
        state = zero1_state.saved_state(*sharded, self.param_groups, self.base_optimizer, self._sharding)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        is_part = self._sharding.size > 1 or is_divided(parameters)
        return part_of_optimizer(self, state) if is_part else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` of this rank has returned; not collective.

        The model loads its parameters too: one that is not a rounded master copy replaces it in the next step.

        Raises ``ValueError`` for the state of another rank, number of ranks or set of parameters, before
        anything is changed.
        """
        pieces = self._ordered()
        zero1_state.check_state(state_dict, pieces, self.param_groups, self._sharding)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(zero1_state.options_of(saved))
        self._give_options()
        zero1_state.load_state(state_dict, pieces, self.base_optimizer)
        self.state = self.base_optimizer.state

    def _prepare(self, parameters: Sequence[nn.Parameter]) -> None:
        zero1_checks.check_distinct(parameters)
        zero1_checks.refuse_divided(parameters, self._sharding.groups)
        if self._sharding.accumulated is not None:
            for parameter in parameters:
                accumulate_in(parameter, self._sharding.accumulated)

    def _step(self) -> None:
        if self._reduction.is_done():
            self._sharded.follow()
            self._give_options()
        else:
            self._reduce()
            if self._sharding.whole:
                self._mark()
        if self.grad_clipping:
            self.grad_norm = self._reduction.clip(self.max_norm)
        self.base_optimizer.step()
        self._reduction.gather()

    def _reduce(self, before: Sequence[Hook] = (), after: Sequence[Hook] = ()) -> None:
        """Give the pieces their reduced gradients."""
        self._add_members()
        self._sharded.follow()
        self._give_options()
        self._steps += 1
        self._reduction.reduce(self._sharded.buckets, self._present_anywhere(), before, after)

    def _mark(self) -> None:
        self._reduction.mark(member.parameter for member in self._sharded.sharded())

    def _clip(self, max_norm: float) -> torch.Tensor:
        self._reduction.check_done()
        with board.call("Zero1Optimizer.gradient_norm", has_limit=True), failure_watch.reported(), torch.no_grad():
            return self._reduction.clip(max_norm)

    def _present_anywhere(self) -> list[bool]:
        """Return for each parameter whether a replica has its gradient. Raises as ``step`` does."""
        present = [member.parameter.grad is not None for member in self._sharded.members]
        if self._sharding.replicas == 1:
            return present
        sharding = self._sharding
        settings = (self.grad_clipping, self.max_norm, sharding.mean, sharding.groups, sharding.whole)
        options = hash_of_options(self.param_groups, settings)
        position = ReplicaPosition(self._steps, board.training_steps(), self._sharded.layout, len(present), options)
        return present_anywhere(present, position)

    def _add_members(self) -> None:
        """Shard parameters that were added, or that require or have a gradient since the last step."""
        for bucket in self._sharded.add(self.param_groups):
            for piece in bucket.pieces:
                group = self.base_optimizer.param_groups[piece.member.group]
                group["params"].append(piece.tensor)
                if isinstance(self.base_optimizer, torch.optim.Adagrad):
                    # Torch 2.9 makes its state in the constructor only, from the initial value that this was given.
                    initial = self.base_optimizer.defaults["initial_accumulator_value"]
                    own = [{**zero1_state.options_of(group), "params": [piece.tensor]}]
                    alone = torch.optim.Adagrad(own, initial_accumulator_value=initial)
                    self.state[piece.tensor] = alone.state[piece.tensor]

    def _ordered(self) -> list[ShardedPiece]:
        """The pieces in the order of the base optimizer's state."""
        by_tensor = {id(piece.tensor): piece for piece in self._sharded.pieces()}
        return [by_tensor[id(tensor)] for group in self.base_optimizer.param_groups for tensor in group["params"]]

    def _give_options(self) -> None:
        """Give the base optimizer the options that schedulers and programs have set."""
        for group, base in zip(self.param_groups, self.base_optimizer.param_groups, strict=True):
            base.update(zero1_state.options_of(group))
