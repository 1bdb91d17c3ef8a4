"""The dictionary of the items that were used last, beside a list that is kept in the order of use."""

from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from nxdpp.agreement import last_used
from nxdpp.agreement.last_used import LastUsed

_KEYS = st.integers(0, 6)


@given(st.lists(st.tuples(st.sampled_from(["read", "get", "write", "drop"]), _KEYS)), st.integers(1, 4))
def test_the_items_that_were_used_last_are_kept(uses: list[tuple[str, int]], kept: int) -> None:
    cache: LastUsed[int, int] = LastUsed()
    order: list[int] = []
    with patch.object(last_used, "KEPT", kept):
        for number, (use, key) in enumerate(uses):
            assert (key in cache) == (key in order)
            if use == "write":
                cache[key] = number
            elif use == "drop":
                cache.pop(key, None)
            elif use == "get" or key in order:
                found = cache.get(key) if use == "get" else cache[key]
                assert (found is None) == (key not in order)
            if use == "write" or key in order:
                order = [other for other in order if other != key] + [key] * (use != "drop")
            order = order[-kept:]
            assert list(cache) == order
