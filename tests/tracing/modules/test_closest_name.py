"""Closest known name to an unknown one."""

from nxdpp.tracing.modules.closest_name import closest, meant


def test_the_closest_name_is_suggested() -> None:
    assert meant("lables", ["input_ids", "labels"]) == " (did you mean 'labels'?)"
    assert meant("foo", ["input_ids", "labels"]) == ""
    assert closest("inputs", ["input_ids", "labels"], 0.75) == "input_ids"
    assert closest("input", ["input_ids", "labels"], 0.75) is None
