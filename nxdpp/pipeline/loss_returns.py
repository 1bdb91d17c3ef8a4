"""Type parameters of ``NxDPPModel``: by its two flags for losses, type checkers know the result of ``run_train``."""

from typing import Literal

from typing_extensions import TypeVar

PerMicrobatch = TypeVar("PerMicrobatch", bool, Literal[True], Literal[False], covariant=True, default=Literal[False])
"""The type of ``return_mb_loss``."""

# A function that takes an ``NxDPPModel`` without parameters takes one that broadcasts its loss too.
OnEveryRank = TypeVar("OnEveryRank", bool, Literal[True], Literal[False], covariant=True, default=bool)
"""The type of ``broadcast_and_average_loss``."""
