"""The batches of an optimizer step, which all run with the first one, as they are or each split by rows.

::

    get_batch_samples   0 1 2 3        begin
    training_step       ▲ · · ·        loss_of: the first one runs all; each returns the loss of its batch
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nxdpp.counted import counted
from nxdpp.ground.torch_names import VERSION
from nxdpp.pipeline.microbatches.token_budget import check_budget


class StepBatches:
    """The batches of an optimizer step that ``training_step`` has not received yet, and their losses after they ran."""

    def __init__(self) -> None:
        self._batches: deque[_Batch] = deque()
        self._losses: deque[torch.Tensor] = deque()

    def clear(self) -> None:
        """Forget an unfinished step."""
        self._batches.clear()
        self._losses.clear()

    def begin(self, batches: Sequence[Any]) -> None:
        """Begin a step of ``batches``. Raises ``ValueError`` for an earlier step that was left unfinished."""
        self.check_ended()
        self._batches = deque(map(_Batch, batches))

    def check_ended(self) -> None:
        """Raise ``ValueError`` for a step that was left before its end; not collective."""
        if self._losses:
            raise ValueError(
                f"a callback has ended an epoch, or the training, inside of an optimizer step, "
                f"{counted(len(self._losses), 'batch')} before its end, and the gradients are those of all its "
                "batches. Set control.should_epoch_stop or should_training_stop in on_step_end."
            )

    def loss_of(self, inputs: Any, run: Callable[[list[Any]], list[torch.Tensor]]) -> torch.Tensor:
        """Return the loss of the batch ``inputs``, after ``run`` for all batches of the step.

        Outside of a step only ``inputs`` run.

        Raises:
            ValueError: for a batch that is not the next one of the step, and for one that was changed.
        """
        if not self._batches:
            return run([inputs])[0]
        if not self._batches[0].is_unchanged(inputs):
            raise ValueError(
                "training_step was given another batch than the data loader's next one, or a changed one. All batches "
                "of an optimizer step run with the first, so a training_step of one's own cannot change them, or run "
                "them twice. Change them in data_collator."
            )
        if not self._losses:
            self._losses.extend(run([each.batch for each in self._batches]))
        self._batches.popleft()
        return self._losses.popleft()


class _Batch:
    """A batch as the data loader gave it."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self._values = dict(batch) if isinstance(batch, Mapping) else {}
        self._versions = _versions(self._values)

    def is_unchanged(self, inputs: Any) -> bool:
        """Return whether ``inputs`` are this batch, with its values."""
        if inputs is not self.batch:
            return False
        values = dict(inputs) if isinstance(inputs, Mapping) else {}
        return (
            values.keys() == self._values.keys()
            and all(values[name] is value for name, value in self._values.items())
            and _versions(values) == self._versions
        )


def _versions(values: Mapping[str, Any]) -> dict[str, int]:
    """The numbers of changes in place of the tensors among ``values``; tensors of inference mode have none."""
    return {
        name: VERSION.of(value)
        for name, value in values.items()
        if isinstance(value, torch.Tensor) and not value.is_inference()
    }


def split_rows(batch: Mapping[str, Any], parts: int, most_tokens: int | None = None) -> list[dict[str, Any]]:
    """Return ``batch`` in at most ``parts`` parts of its rows: ``(b, ...)`` of each tensor ``(B, ...)``.

    ``most_tokens`` is the argument that gives ``parts``; by default ``num_microbatches`` does.

    Fewer rows than parts give a part each. Values other than tensors go whole to each part.

    Raises:
        ValueError: for tensors with different first dimensions.
    """
    if parts == 1:
        return [dict(batch)]
    sizes = {name: value.size(0) for name, value in batch.items() if isinstance(value, torch.Tensor) and value.ndim}
    if len(set(sizes.values())) != 1:
        name = "num_microbatches" if most_tokens is None else f"most_tokens={most_tokens}"
        remedy = (
            "Use num_microbatches=gradient_accumulation_steps, which splits no batch."
            if most_tokens is None
            else "Leave it out, and no batch is split: per_device_train_batch_size is the rows of a microbatch."
        )
        raise ValueError(
            f"{name} splits each batch by rows, and its tensors have different first dimensions: {sizes}. {remedy}"
        )
    rows = min(parts, next(iter(sizes.values())))
    columns = {name: value.tensor_split(rows) if name in sizes else [value] * rows for name, value in batch.items()}
    return [{name: column[part] for name, column in columns.items()} for part in range(rows)]


def parts_within(batch: Mapping[str, Any], most_tokens: int) -> int:
    """Return the least number of parts of the rows of ``batch`` whose tokens, padding included, are ``most_tokens``.

    Raises ``ValueError`` for rows that are longer, and for a batch without ``input_ids`` of shape (B, T).
    """
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        raise ValueError(
            f"most_tokens={most_tokens} counts the tokens of input_ids (B, T), and the batch has {sorted(batch)}. Use "
            f"num_microbatches."
        )
    rows, length = ids.shape
    check_budget(most_tokens, length)
    return -(-rows // max(1, most_tokens // max(1, length)))


def joined(losses: Sequence[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
    """Return the loss of each batch: the sum of the losses of its parts. Batch ``i`` has ``counts[i]`` parts."""
    ends = [sum(counts[: number + 1]) for number in range(len(counts))]
    return [torch.stack(list(losses[end - count : end])).sum() for end, count in zip(ends, counts, strict=True)]
