"""The schedule of an evaluation."""

from nxdpp.schedules.forward_only import forward_only


def test_every_rank_runs_its_microbatches_in_order() -> None:
    assert [" ".join(map(str, actions)) for actions in forward_only(3, 4)] == [
        "0F0 0F1 0F2 0F3",
        "1F0 1F1 1F2 1F3",
        "2F0 2F1 2F2 2F3",
    ]


def test_one_stage_and_one_microbatch() -> None:
    assert [list(map(str, actions)) for actions in forward_only(1, 1)] == [["0F0"]]
