"""Errors that only tell that another rank has gone or failed, and those of a user's own connections."""

import pytest
import torch.distributed as dist

from nxdpp.ranks.faults.connection_errors import is_collective_error, is_connection_error, is_told, told

GLOO = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1")


def _caused_by(cause: BaseException) -> BaseException:
    error = RuntimeError("the step failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_connection", "is_collective"),
    [
        (GLOO, True, True),
        (_caused_by(GLOO), True, True),
        (dist.DistNetworkError("Failed to recv, got 0 bytes"), True, True),
        (ConnectionResetError("Connection reset by peer"), True, False),
        (ConnectionRefusedError("a logger of metrics"), True, False),
        (ValueError("gloo/transport"), False, False),
        (RuntimeError("shapes do not fit"), False, False),
    ],
)
def test_connection_errors(error: BaseException, is_connection: bool, is_collective: bool) -> None:
    assert is_connection_error(error) is is_connection
    assert is_collective_error(error) is is_collective


def test_an_error_that_was_told_is_known_behind_another() -> None:
    assert is_told(_caused_by(told(ValueError("on rank 0, ValueError: bad"))))
    assert not is_told(_caused_by(ValueError("bad")))
