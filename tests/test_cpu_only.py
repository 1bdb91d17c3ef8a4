"""The mark cpu_only has a reason, which the run on the fake accelerator shows."""

import pytest

from tests.conftest import reason_of


def test_a_reason_is_shown() -> None:
    assert reason_of(pytest.mark.cpu_only("gloo's sums").mark, "a test") == "only on the CPU: gloo's sums"


@pytest.mark.parametrize("arguments", [(), ("",), (" ",), ("one", "two")])
def test_a_mark_without_a_reason_is_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(pytest.UsageError, match="a test: write why it cannot hold on a device"):
        reason_of(pytest.mark.cpu_only(*arguments).mark, "a test")
