"""The board tells which call and action this rank is in."""

import gc
import weakref

import pytest

from nxdpp.ranks.faults.board import NO_ACTION, Board


def test_the_place_of_an_error_is_the_call_that_it_ended() -> None:
    board = Board()
    with board.call("run_train", "step", "pipeline"):
        pass
    with pytest.raises(RuntimeError) as caught, board.call("save_pretrained"):
        raise RuntimeError("connection closed")
    assert str(board.position_of(caught.value)) == "save_pretrained"
    outer = ValueError("of the program")
    outer.__cause__ = caught.value
    assert str(board.position_of(outer)) == "save_pretrained"
    assert str(board.position_of(RuntimeError("another"))) == "outside of nxdpp, after save_pretrained"


def test_a_call_is_numbered_by_name_and_by_scope() -> None:
    board = Board()
    assert str(board.position()) == "outside of nxdpp, before its first call"
    for _ in range(2):
        with board.call("run_train", "step", "pipeline"):
            pass
    with board.call("save_pretrained"):
        assert str(board.position()) == "save_pretrained"
        assert board.position().number == 1
        assert board.position().begun == 3
    with board.call("run_train", "step", "pipeline"):
        position = board.position()
    assert (str(position), position.scope, position.number) == ("run_train step 3", "pipeline", 3)
    assert str(board.position()) == "outside of nxdpp, after run_train step 3"


def test_a_construction_is_a_place_and_no_call() -> None:
    board = Board()
    with board.construction():
        assert str(board.position()) == "in the construction of a model"
        with board.construction(), board.call("from_all_ranks"):
            assert str(board.position()) == "from_all_ranks"
        assert str(board.position()) == "in the construction of a model"
        assert not board.position().call
    assert str(board.position()) == "outside of nxdpp, after from_all_ranks"


def test_an_action_is_described_while_it_runs() -> None:
    board = Board()
    with board.call("run_train", "step", "pipeline"):
        board.describe_action = ["stage 2, forward of microbatch 5"].__getitem__
        board.action = 0
        assert str(board.position()) == "run_train step 1, stage 2, forward of microbatch 5"
        # The watch may ask between two steps of different lists.
        board.action = 9
        assert str(board.position()) == "run_train step 1"
        board.end_actions()
        assert str(board.position()) == "run_train step 1"
    assert board.action == NO_ACTION


def test_a_call_within_another_is_a_part_of_it_and_a_move() -> None:
    board = Board()
    with board.call("run_train", "step", "pipeline"):
        before = board.moves
        with board.call("move_model_to_device"):
            assert str(board.position()) == "run_train step 1"
        assert board.moves > before
        assert str(board.position()) == "run_train step 1"
    assert board.position().begun == 1


def test_only_calls_that_tell_their_progress_have_a_limit() -> None:
    board = Board()
    with board.call("save_pretrained"):
        assert not board.position().has_limit
    with board.call("run_train", "step", "pipeline", has_limit=True):
        assert board.position().has_limit


def test_calls_of_two_threads_leave_no_stale_call() -> None:
    board = Board()
    first, second = board.call("run_train"), board.call("save_pretrained")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert board.position().call == ""


@pytest.mark.parametrize(("error", "interrupted"), [(SystemExit(3), "save_pretrained"), (ValueError(), "")])
def test_a_call_that_the_program_leaves_for_good_is_kept(error: BaseException, interrupted: str) -> None:
    board = Board()
    with pytest.raises(type(error)), board.call("save_pretrained"):
        raise error
    assert board.interrupted == interrupted
    with board.call("save_pretrained"):
        pass
    assert board.interrupted == ""


def test_the_board_keeps_nothing_of_a_step() -> None:
    board = Board()

    class Engine:
        def describe(self, at: int) -> str:
            return str(at)

    engine = Engine()
    kept = weakref.ref(engine)
    board.describe_action = engine.describe
    board.end_actions()
    del engine
    gc.collect()
    assert kept() is None


def test_a_wait_that_was_left_is_over_in_the_next_call() -> None:
    board = Board()
    board.wait = "the collective of a layer that raised"
    with board.call("run_train"):
        assert board.wait is None
