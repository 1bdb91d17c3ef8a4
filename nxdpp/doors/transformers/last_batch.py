"""The last batch of an epoch, whose rows do not divide over replicas: accelerate fills it with first rows.

::

    11 rows, batches of 4      replica 0    0 1 2 3    8 9 10 │ 0      3 own rows, and 1 to fill
                               replica 1    4 5 6 7    1 2 3 0         none

Rows that fill are cut off, and a replica weighs as much as its own rows. One without any runs the rows that fill with a
weight of 0: all replicas run each step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.state import GradientState
from accelerate.utils import recursively_apply
from torch import nn

from nxdpp.ranks import parallel_state
from nxdpp.tracing.models.image_rows import first_rows

_IGNORED = -100


@dataclass(frozen=True)
class LastBatch:
    """Rows of a last batch.

    Attributes:
        rows: own rows of this replica.
        size: its rows with the ones that fill.
        total: own rows of all replicas.
    """

    rows: int
    size: int
    total: int

    @classmethod
    def of(cls, batch: Any, remainder: int, has_loss: bool = True) -> "LastBatch | None":
        """Return the rows of a last ``batch``, of which all replicas have ``remainder``; ``None`` if it is full.

        Raises ``ValueError`` for one that ``has_loss`` and does not tell which of its tensors' values fill.
        """
        replicas, replica = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
        if replicas == 1 or remainder <= 0:
            return None
        size = _common_size(batch)
        if size is None:
            if has_loss and isinstance(batch, Mapping):
                _refuse(batch, remainder, replicas)
            return None
        return (
            cls(min(max(remainder - replica * size, 0), size), size, remainder) if remainder < replicas * size else None
        )

    @property
    def weight(self) -> float:
        """Weight of this replica's mean over its own rows in the mean over replicas."""
        return self.rows * parallel_state.get_data_parallel_size() / self.total

    @property
    def without(self) -> int:
        """The number of replicas that have no row of their own."""
        return parallel_state.get_data_parallel_size() - -(-self.total // self.size)

    def own(self, batch: Mapping[str, Any]) -> Any:
        """Return ``batch`` without the rows that fill, maybe with no row; with images, without their labels."""
        if len(_sizes(batch)) > 1:
            return self.unlabelled(batch)
        return _with(batch, {name: value[: self.rows] for name, value in batch.items() if _has_rows(value)})

    def trained(self, batch: Mapping[str, Any], model: nn.Module) -> Any:
        """Return the own rows of ``batch`` with their images; a replica without any keeps all its rows, and no image.

        Images of rows that fill would give the modules that read them gradients of 0, where one process has ``None``.
        Images whose rows ``model`` does not tell, or needs, stay.
        """
        tokens = batch.get("input_ids")
        if isinstance(tokens, torch.Tensor) and len(tokens) == self.size:
            try:
                return _only(batch, first_rows(model, batch, self.rows))
            except ValueError:
                pass
        return self.own(batch) if self.rows else batch

    def unlabelled(self, batch: Mapping[str, Any]) -> Any:
        """Return ``batch`` with no labels in the rows that fill."""
        labels = batch["labels"].clone()
        labels[self.rows :] = _IGNORED
        return _with(batch, {"labels": labels})

    def filled(self, outputs: Any) -> Any:
        """Return ``outputs`` (rows, ...) of own rows as (size, ...): the first one fills them."""

        def fill(tensor: torch.Tensor) -> torch.Tensor:
            if self.rows in (0, self.size) or not tensor.ndim or tensor.size(0) != self.rows:
                return tensor
            return torch.cat([tensor, tensor[:1].expand(self.size - self.rows, *tensor.shape[1:])])

        return recursively_apply(fill, outputs)


def weights_of(batches: Sequence[Mapping[str, Any]], rows: Sequence[LastBatch | None]) -> list[float]:
    """Return the weight of each of a step's ``batches``, whose losses are means, in the mean over them and replicas.

    A mean over rows weighs as the replica's own ``rows``. One over the labels of tokens weighs as one batch, as batches
    that one process accumulates; those of replicas without rows are none.
    """
    last = next((each for each in rows if each is not None), None)
    if last is None or not _has_labels_of_tokens(batches[-1]):
        return [1.0 if each is None else each.weight for each in rows]
    count = len(rows) * parallel_state.get_data_parallel_size()
    return [count / (count - last.without) if each is None or each.rows else 0.0 for each in rows]


def with_own_labels(batch: Any, last: LastBatch | None) -> Any:
    """Return ``batch`` with the labels that count: none on a replica without rows of its own."""
    return batch if last is None or last.rows or "labels" not in batch else last.unlabelled(batch)


def last_of_loader(batch: Any) -> LastBatch | None:
    """Return the rows of ``batch``, which the present data loader of accelerate has just given, if it is its last.

    Raises as ``LastBatch.of`` for each batch: an epoch is refused with its first one.
    """
    state = GradientState()
    last = LastBatch.of(batch, state.remainder)
    return last if state.end_of_dataloader else None


class NotedLast:
    """The last batch of an epoch, while its step is the present one."""

    def __init__(self) -> None:
        self._noted: list[tuple[Any, LastBatch]] = []

    def of(self, batch: Any) -> LastBatch | None:
        """Return the rows of ``batch``, if it is the last one and does not divide over replicas."""
        return next((last for noted, last in self._noted if noted is batch), None)

    def begin_step(self, batches: Iterator[Any], parts: int, model: nn.Module) -> Iterator[Any]:
        """Forget the batch of an earlier step, and return ``batches`` of a loader for ``model``.

        The last one comes without the rows that fill, and is noted. Where each batch is split into ``parts``, its loss
        is a sum over labels: these rows stay, without labels.
        """
        self._noted = noted = []
        for batch in batches:
            last = last_of_loader(batch)
            if last is not None:
                if parts == 1:
                    batch = last.trained(batch, model)
                elif last.rows:
                    batch = last.unlabelled(batch)
                noted.append((batch, last))
            yield batch


def _with(batch: Any, changed: Mapping[str, Any]) -> Any:
    """Return a copy of ``batch``, of its class, with ``changed`` values."""
    return _only(batch, {**batch, **changed})


def _only(batch: Any, values: dict[str, Any]) -> Any:
    """Return ``values``, in the class of ``batch``."""
    return values if isinstance(batch, dict) else type(batch)(values)


def _common_size(batch: Any) -> int | None:
    """The rows of a batch, if all tensors have as many. Images may have others, beside a label for each token."""
    if not isinstance(batch, Mapping):
        return None
    sizes = _sizes(batch)
    tokens, labels = batch.get("input_ids"), batch.get("labels")
    if isinstance(tokens, torch.Tensor) and isinstance(labels, torch.Tensor):
        sizes = {labels.size(0)} if tokens.shape == labels.shape and labels.ndim > 1 else sizes
    return sizes.pop() if len(sizes) == 1 else None


def _has_labels_of_tokens(batch: Mapping[str, Any]) -> bool:
    labels = batch.get("labels")
    return isinstance(labels, torch.Tensor) and labels.ndim > 1 and not labels.is_floating_point()


def _refuse(batch: Mapping[str, Any], remainder: int, replicas: int) -> None:
    sizes = {name: value.size(0) for name, value in batch.items() if _has_rows(value)}
    raise ValueError(
        f"the last batch of {replicas} data-parallel replicas has {remainder} rows, filled up with first rows of the "
        f"data set, and its tensors do not tell which values belong to those: first dimensions {sizes}, and no label "
        f"for each token. They would count twice. Set dataloader_drop_last=True, or give a number of rows that divides."
    )


def _sizes(batch: Mapping[str, Any]) -> set[int]:
    return {value.size(0) for value in batch.values() if _has_rows(value)}


def _has_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0
