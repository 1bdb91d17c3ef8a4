"""Rows packed into microbatches of at most a number of tokens, with the padding up to the longest row of each.

::

    rows of 7 3 5 2 2 tokens, 10 tokens per microbatch   7 │ 5 3 │ 2 2          7, 2 * 5 and 2 * 2 tokens
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

_Row = TypeVar("_Row")


def batches_of_tokens(
    rows: Iterable[_Row], most_tokens: int, length: Callable[[_Row], int] | None = None
) -> list[list[_Row]]:
    """Return rows in groups of at most a number of tokens, for ``run_train_microbatches``.

    A group is padded to its longest row, and this padding counts. Rows of similar lengths share a group. The groups
    follow from the lengths alone, so they are the same on all ranks with the same rows; not collective::

        for rows in loader:                                         # collate_fn=list
            groups = nxdpp.batches_of_tokens(rows, 8192)
            model.run_train_microbatches([collate(group) for group in groups])

    The numbers of rows differ: ``loss_normalization="tokens"`` gives the loss of the whole batch.

    Args:
        rows: such as dicts with ``input_ids`` of shape (T,), a tensor or a list.
        most_tokens: the budget of a group, at least the length of each row.
        length: a function that returns the number of tokens of a row; by default of its ``input_ids``, or of the row.

    Raises ``ValueError`` for a budget that a row exceeds, and for no rows.
    """
    given = list(rows)
    lengths = list(map(_length if length is None else length, given))
    check_budget(most_tokens, max(lengths, default=1))
    if not given:
        raise ValueError("batches_of_tokens was given no rows: a step has at least one microbatch.")
    groups: list[list[_Row]] = []
    longest = 0
    # The longest first: a row never lengthens the group that it joins.
    for at in sorted(range(len(given)), key=lambda at: -lengths[at]):
        if not groups or (len(groups[-1]) + 1) * longest > most_tokens:
            groups.append([])
            longest = lengths[at]
        groups[-1].append(given[at])
    return groups


def check_budget(most_tokens: Any, longest: int) -> None:
    """Raise ``ValueError`` unless a row of ``longest`` tokens is within a budget of ``most_tokens``, a whole number."""
    if isinstance(most_tokens, bool) or not isinstance(most_tokens, int) or most_tokens < 1:
        raise ValueError(f"most_tokens={most_tokens!r} must be a whole number of tokens, at least 1.")
    if longest > most_tokens:
        raise ValueError(
            f"a row has {longest} tokens, and a microbatch at most most_tokens={most_tokens}. Raise most_tokens to "
            f"{longest}, or shorten the row."
        )


def _length(row: Any) -> int:
    tokens = row["input_ids"] if isinstance(row, Mapping) else row
    if not isinstance(tokens, torch.Tensor | Sequence) or isinstance(tokens, str):
        raise ValueError(f"a row is a {type(row).__name__}, whose tokens are not known: give length=, a function.")
    return len(tokens)
