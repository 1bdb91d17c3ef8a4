"""Activations are kept from forward to backward."""

from nxdpp.pipeline.in_flight import microbatches_in_flight


def test_1f1b_keeps_one_fewer_on_each_stage_and_no_more_than_there_are() -> None:
    assert microbatches_in_flight(4, 16) == [4, 3, 2, 1]
    assert microbatches_in_flight(4, 2) == [2, 2, 2, 1]


def test_of_several_chunks_the_first_is_kept_longest() -> None:
    # rank 0: f0 f1 F0 F1 f2 B0 f3 B1 F2 b0 ...    rank 1: f0 f1 F0 B0 F1 B1 f2 b0 ...    (F, B: the second chunk)
    assert microbatches_in_flight(2, 4, 2) == [4, 3, 2, 1]
    assert microbatches_in_flight(2, 1, 3) == [1] * 6
