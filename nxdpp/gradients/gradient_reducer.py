"""Gradients of some parameters, reduced over the replicas once for each step, with marks that show later changes.

::

    reduce ─▶ set ─▶ reduce again: the same gradients, nothing to do
                 ├─▶ zero_grad, backward, reduce again: other gradients, reduce them
                 ├─▶ .grad = ..., reduce again: RuntimeError, it may be of the sum of all or of one replica
                 └─▶ backward: RuntimeError, it would add one replica's gradient to the sum of all
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from nxdpp.gradients.average import reduce_gradients
from nxdpp.gradients.buckets import BUCKET_BYTES, Hook
from nxdpp.ground.torch_names import VERSION
from nxdpp.ranks.group_values import extremes

_REMEDY = "Call zero_grad() of the optimizer before the next backward."


class ReductionMarks:
    """The gradients of one reduction.

    Args:
        control: a group of the replicas for CPU tensors, ``None`` for one.
        are_results: whether the marked gradients are the result, which a program may change in place. Else they are
            what was reduced.
    """

    def __init__(self, control: ProcessGroup | None, are_results: bool = True) -> None:
        self._control, self._are_results = control, are_results
        self._parameters: list[nn.Parameter] = []
        self._marked: dict[int, tuple[torch.Tensor, int]] = {}
        self._hooks: list[RemovableHandle] = []
        self._is_after_step = self._is_computed = False
        self.is_set = False

    def set(self, parameters: Iterable[nn.Parameter]) -> None:
        """Mark the gradients that ``parameters`` have now."""
        self.clear()
        self._parameters = list(parameters)
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._marked[id(parameter)] = parameter.grad, VERSION.of(parameter.grad)
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._refuse_addition))
        self.is_set = True

    def clear(self) -> None:
        """Forget the gradients."""
        for hook in self._hooks:
            hook.remove()
        self._parameters, self._marked, self._hooks = [], {}, []
        self._is_after_step = self._is_computed = self.is_set = False

    def end_step(self) -> None:
        """Continue without hooks: a later backward is found by the next ``are_present``, which raises then."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.follow()
        self._is_after_step = True

    def follow(self) -> None:
        """Mark the same gradients as they are now, after an optimizer has changed them."""
        for parameter in self._parameters:
            if self._is_kept(parameter):
                assert parameter.grad is not None
                self._marked[id(parameter)] = parameter.grad, VERSION.of(parameter.grad)

    def are_present(self) -> bool:
        """Return whether the parameters still have the marked gradients, on all replicas alike.

        Collective over the replicas where gradients are marked; all of them have marked some, or none has. If the
        gradients are new, the marks are cleared.

        Raises ``RuntimeError`` on all replicas where some gradients are the marked ones and others are new, and where
        a program has put tensors in the place of results. Also for gradients that were changed since ``end_step``.
        """
        if not self.is_set:
            return False
        if self._is_after_step:
            for parameter in self._parameters:
                # With create_graph a backward adds in a new tensor.
                is_sum = parameter.grad is not None and parameter.grad.requires_grad
                if self._is_changed(parameter) if self._is_kept(parameter) else is_sum:
                    raise RuntimeError(_addition(parameter))
        kept = any(self._is_kept(parameter) for parameter in self._parameters)
        new = any(each.grad is not None and not self._is_kept(each) for each in self._parameters)
        replaced = new and self._are_results and bool(self._marked) and not (self._is_after_step or self._is_computed)
        own = [kept, new or (bool(self._marked) and not kept), replaced]
        if self._control is not None:
            _, own = extremes(own, self._control, name="comparison of kept gradients")
        is_kept, is_new, is_replaced = own
        if is_replaced:
            raise RuntimeError(
                "tensors were put in the place of gradients after these were reduced over the data-parallel replicas, "
                "on this replica or another, and would be reduced again. Change the gradients in place, such as by "
                "parameter.grad.mul_(factor), or call zero_grad() of the optimizer before new ones."
            )
        if is_kept and is_new:
            raise RuntimeError(
                f"some gradients were reduced over the data-parallel replicas before, and others are new, on this "
                f"replica or another. {_REMEDY}"
            )
        if is_new:
            self.clear()
        return not is_new

    def check_unchanged(self) -> None:
        """Raise ``RuntimeError`` for a marked gradient that was removed, or changed in place where it is no result.

        After ``end_step`` for a result that was changed too.
        """
        is_followed = self._are_results and not self._is_after_step
        for parameter in self._parameters:
            is_changed = not self._is_kept(parameter) or (not is_followed and self._is_changed(parameter))
            if id(parameter) in self._marked and is_changed:
                raise RuntimeError(
                    f"the gradient of a parameter of shape {list(parameter.shape)} was changed after it was reduced, "
                    f"and the step would ignore that. Change gradients before, or by functions of the optimizer."
                )

    def _is_kept(self, parameter: nn.Parameter) -> bool:
        marked = self._marked.get(id(parameter))
        return marked is not None and parameter.grad is marked[0]

    def _is_changed(self, parameter: nn.Parameter) -> bool:
        return parameter.grad is not None and VERSION.of(parameter.grad) != self._marked[id(parameter)][1]

    def _refuse_addition(self, parameter: torch.Tensor) -> None:
        marked = self._marked.get(id(parameter))
        assert parameter.grad is not None
        if marked is not None and (parameter.grad is marked[0] or parameter.grad.requires_grad):
            raise RuntimeError(_addition(parameter))
        self._is_computed = True


def _addition(parameter: torch.Tensor) -> str:
    return (
        f"a backward adds to the gradient of a parameter of shape {list(parameter.shape)}, which was reduced over the "
        f"data-parallel replicas already: it would be counted again. {_REMEDY}"
    )


class GradientReducer:
    """Reduces the gradients of ``parameters`` over ``group`` that are not reduced yet.

    Args:
        parameters, group, control, mean, bucket_bytes: as in ``reduce_gradients``.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: ProcessGroup,
        control: ProcessGroup,
        *,
        mean: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.parameters = list({id(each): each for each in parameters}.values())
        self._group, self._control = group, control
        self._mean, self._bucket_bytes = mean, bucket_bytes
        self._marks = ReductionMarks(control)

    @property
    def is_reduced(self) -> bool:
        """``True`` after ``reduce``, until ``forget``."""
        return self._marks.is_set

    def reduce(self, before: Sequence[Hook] = (), after: Sequence[Hook] = ()) -> None:
        """Reduce the gradients in place; collective over the group. Nothing happens where they are reduced already.

        A backward after it raises ``RuntimeError``, unless ``zero_grad`` has removed the gradients. New gradients are
        reduced by the next call. ``before`` and ``after`` are as in ``reduce_gradients``, and so are its errors.
        """
        if self._marks.are_present():
            return
        reduce_gradients(
            self.parameters,
            self._group,
            self._control,
            mean=self._mean,
            before=before,
            after=after,
            bucket_bytes=self._bucket_bytes,
        )
        self._marks.set(parameter for parameter in self.parameters if parameter.requires_grad)

    def end_step(self) -> None:
        """Note that an optimizer has stepped with the gradients. They stay reduced until they are removed."""
        if self._marks.is_set:
            self._marks.end_step()

    def forget(self) -> None:
        """Forget the reduction, after ``zero_grad``: later gradients belong to this rank only."""
        self._marks.clear()
