"""A call whose questions the host answers does all that the call itself does."""

from typing import Any

import pytest

from nxdpp.pipeline.stages.answered_call import AnsweredCall
from nxdpp.tracing.graph.calls import OpaqueCall


class _Verified(OpaqueCall):
    def __init__(self) -> None:
        self.__name__ = "verified"

    def __call__(self, *traced: Any) -> Any:
        raise ValueError("verified")


def test_what_a_call_verifies_is_verified() -> None:
    call = AnsweredCall(_Verified())
    assert call.__name__ == "verified"
    with pytest.raises(ValueError, match="verified"):
        call(1)
