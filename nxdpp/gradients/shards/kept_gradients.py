"""Gradients that stay whole on this replica after a step in ``no_sync()``, and what a program does to them meanwhile.

::

    step in no_sync()      mark           .grad of the rows, without values, gets the smallest number
    optimizer's step       check_step     refused: it would use the rows' .grad, which has none of them
    next training step     drop_cleared   zero_grad() drops them; any other change is refused
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nxdpp.agreement.same_values import hash_of_all
from nxdpp.counted import counted
from nxdpp.gradients.shards.local_tensors import local_rows

# From torch 2.15 on: the dtype in which autograd itself adds up the gradients of a whole parameter.
GRADIENT_DTYPE = "unsharded_grad_dtype"
_REMEDY = "Run the last step before it outside of no_sync(), or call zero_grad()."


@dataclass(frozen=True, eq=False)
class _KeptGradient:
    """A parameter with whole gradients on this replica: hashes of its rows, and of its ``.grad``, maybe marked."""

    of: Any
    gradient: torch.Tensor
    is_marked: bool
    values: bytes
    marked: bytes

    @property
    def has_rows(self) -> bool:
        return local_rows(self.gradient).numel() > 0

    def is_cleared(self) -> bool:
        """Return whether the program has set ``.grad`` to zeros or ``None``."""
        now = self.of.sharded_param.grad
        return now is None or (self.has_rows and not local_rows(now).any())

    def change(self) -> tuple[str, str] | None:
        """Return what the program has done to the parameter or ``.grad``, if anything."""
        row = self.of.sharded_param
        if not row.requires_grad:
            return "a parameter", "frozen"
        if row.grad is not self.gradient or hash_of_all(local_rows(self.gradient)) != self.marked:
            return "a gradient", "changed"
        return ("a parameter", "changed") if hash_of_all(local_rows(row)) != self.values else None


class KeptGradients:
    """The kept gradients of the unit with this ``name``. Without rows on a rank the other ranks tell."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._kept: list[_KeptGradient] = []

    def mark(self, parameters: Sequence[Any]) -> None:
        """Note the ones of torch's sharded ``parameters`` whose gradients stay whole.

        DTensors count no changes. So ``.grad`` without values gets the smallest number, which ``drop_cleared`` takes
        out again.
        """
        for each in parameters:
            whole = getattr(each, "unsharded_param", None)
            if whole is not None and (whole.grad is not None or each.unsharded_accumulated_grad is not None):
                row = each.sharded_param
                if row.grad is None:
                    row.grad = torch.zeros_like(row, requires_grad=False)
                rows = local_rows(row.grad)
                is_marked = not rows.any()
                if is_marked:
                    rows.fill_(torch.finfo(rows.dtype).tiny)
                values = hash_of_all(local_rows(row)), hash_of_all(rows)
                self._kept.append(_KeptGradient(each, row.grad, is_marked, *values))

    def check_step(self, optimizer: str, stepped: Collection[int]) -> None:
        """Raise ``RuntimeError`` if the ``optimizer`` is about to step a parameter with an id of ``stepped``."""
        left_out = [k for k in self._kept if id(k.of.sharded_param) in stepped and k.has_rows and not k.is_cleared()]
        if left_out:
            raise RuntimeError(
                f"a step of {optimizer} would leave out the gradients of {counted(len(left_out), 'parameter')} of "
                f"{self._name}, the first of shape {list(left_out[0].of.sharded_param.shape)}: the last run_train was "
                "in no_sync(), and no replica has reduced them. Run the last batch of an accumulation outside of "
                "no_sync(), or call zero_grad() to drop them."
            )

    def check(self) -> None:
        """Raise ``RuntimeError`` where the program has changed ``.grad`` or the parameter, or has frozen it."""
        for kept in self._kept_still():
            if (change := kept.change()) is not None:
                what, how = change
                raise RuntimeError(
                    f"{what} of {self._name}, of shape {list(kept.of.sharded_param.shape)}, was {how} after a step in "
                    f"no_sync(), whose gradients no replica has reduced: by the program, by an optimizer's step "
                    f"without them, or by a load. {_REMEDY}"
                )

    def drop_cleared(self) -> None:
        """Drop the whole gradients of parameters whose ``.grad`` the program has set to zeros or ``None`` since."""
        still = self._kept_still()
        for kept in self._kept:
            if kept not in still:
                drop_gradient(kept.of)
            elif kept.is_marked:
                kept.of.sharded_param.grad = None
        self._kept = []

    def _kept_still(self) -> list[_KeptGradient]:
        cleared = [kept.is_cleared() for kept in self._kept]
        pairs = zip(self._kept, cleared, strict=True)
        return [kept for kept, is_cleared in pairs if not is_cleared and (kept.has_rows or not any(cleared))]


def drop_gradient(parameter: Any) -> None:
    """Drop the whole gradient of one of torch's sharded parameters."""
    if hasattr(parameter, "unsharded_param"):
        parameter.unsharded_param.grad = None
    if not hasattr(parameter, GRADIENT_DTYPE):
        parameter.unsharded_accumulated_grad = None
