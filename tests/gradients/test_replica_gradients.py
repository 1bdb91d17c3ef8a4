"""Errors of the average over replicas that began during a step."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from nxdpp.gradients.replica_gradients import ReplicaGradients
from nxdpp.ranks.faults import failure_watch


def test_an_error_at_the_end_of_the_average_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may catch the error: without a report the other replicas would wait, or take later messages for it."""

    def finish() -> None:
        raise ArithmeticError("no average")

    part: Any = SimpleNamespace(module=nn.Linear(2, 2))
    overlapped: Any = SimpleNamespace(finish=finish)
    replicas = ReplicaGradients(part, exchanges=part)
    replicas._overlapped = overlapped
    reported: list[BaseException] = []
    monkeypatch.setattr(failure_watch, "report", reported.append)
    with pytest.raises(ArithmeticError) as caught:
        replicas.finish()
    assert reported == [caught.value]
