"""Options of parameter groups, over ranks and by names."""

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from nxdpp.checkpoint.distributed.parameter_groups import (
    SavedGroup,
    check_divided,
    groups_of,
    joined_groups,
    new_options,
    places_of,
)

A, B, C = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
NAMES = {id(A): "a", id(B): "b", id(C): "c"}


def _loaded(optimizer: Optimizer, saved: list[SavedGroup]) -> list[dict[str, Any]]:
    """The options that each group of ``optimizer`` gets."""
    return new_options(optimizer, places_of(optimizer, NAMES, saved), saved)


def _groups(*groups: dict[str, Any]) -> list[dict[str, Any]]:
    return list(groups)


def test_options_come_back_with_their_types() -> None:
    optimizer = AdamW(_groups({"params": [A, C], "lr": torch.tensor(0.1)}, {"params": [B]}), lr=0.2, betas=(0.8, 0.9))
    saved = groups_of(optimizer, NAMES)
    assert [group.names for group in saved] == [["a", "c"], ["b"]]
    loaded = [SavedGroup(**group) for group in json.loads(json.dumps([group._asdict() for group in saved]))]
    for group, options in zip(optimizer.param_groups, _loaded(optimizer, loaded), strict=True):
        expected = {key: value for key, value in group.items() if key != "params"}
        assert options == expected
        assert type(options["betas"]) is tuple
        assert type(options["lr"]) is type(group["lr"])


def test_an_option_that_json_cannot_hold_is_refused_with_its_place() -> None:
    optimizer = SGD(_groups({"params": [A]}, {"params": [B], "hook": print}), lr=0.1)
    with pytest.raises(ValueError, match=r"param_groups\[1\]\.hook is a builtin_function"):
        groups_of(optimizer, NAMES)


def test_parameters_of_a_model_before_it_was_wrapped_are_refused() -> None:
    other = SGD([A, nn.Parameter(torch.zeros(2, 3))], lr=0.1)
    sentence = (
        r"param_groups\[0\] has 1 parameter that .* shape \[2, 3\]: make the optimizer after the model is wrapped"
    )
    with pytest.raises(ValueError, match=sentence):
        groups_of(other, NAMES)
    with pytest.raises(ValueError, match=sentence):
        places_of(other, NAMES, [SavedGroup({"lr": 1}, ["a"])])


def test_groups_of_ranks_are_joined() -> None:
    ranks = [[SavedGroup({"lr": 1}, ["c"]), SavedGroup({"lr": 2}, [])], [SavedGroup({"lr": 1}, ["a", "c"])] * 1]
    ranks[1] = [ranks[1][0], SavedGroup({"lr": 2}, ["b"])]
    assert joined_groups(ranks) == [SavedGroup({"lr": 1}, ["a", "c"]), SavedGroup({"lr": 2}, ["b"])]


def test_groups_that_differ_are_one_rank_s_after_the_other_s() -> None:
    first = [SavedGroup({"lr": 1}, ["c", "a"]), SavedGroup({"lr": 1}, [])]
    second = [SavedGroup({"lr": 3}, ["b"])]
    # A replica of the first rank, and the copy of a tied parameter.
    third = [SavedGroup({"lr": 1}, ["a"]), SavedGroup({"lr": 1}, ["c"]), SavedGroup({"lr": 4}, ["d"])]
    joined = joined_groups([first, second, third])
    assert joined == [SavedGroup({"lr": 1}, ["a", "c"]), SavedGroup({"lr": 3}, ["b"]), SavedGroup({"lr": 4}, ["d"])]


def test_options_of_one_parameter_that_contradict_each_other_are_refused() -> None:
    one, other = SavedGroup({"lr": 1, "eps": 0}, ["a"]), SavedGroup({"lr": 3, "eps": 0}, ["a"])
    with pytest.raises(ValueError, match="group of a has lr=1 on rank 0 and 3 on rank 2: set the same options"):
        joined_groups([[one], [one], [other]])
    with pytest.raises(ValueError, match=r"group of a has more=None on rank 0 and 1 on rank 1"):
        joined_groups([[one], [SavedGroup({"lr": 1, "eps": 0, "more": 1}, ["a"])]])
    with pytest.raises(ValueError, match=r"group of a has base_lrs=1 on rank 0 and 2 on rank 1"):
        joined_groups([[one._replace(scheduled={"base_lrs": 1})], [one._replace(scheduled={"base_lrs": 2}), other]])


def test_a_group_gets_the_saved_options_of_its_parameters() -> None:
    saved = [SavedGroup({"lr": 1}, ["a"]), SavedGroup({"lr": 2}, ["b", "c"])]
    own = SGD(_groups({"params": [A]}, {"params": [C]}), lr=0.1)
    assert _loaded(own, saved) == [{"lr": 1}, {"lr": 2}]
    without = SGD(_groups({"params": [A]}, {"params": []}), lr=0.1)
    assert _loaded(without, saved) == [{"lr": 1}, {"lr": 2}]
    # Not by their places.
    assert _loaded(SGD(_groups({"params": [B]}, {"params": [A]}), lr=0.1), saved) == [{"lr": 2}, {"lr": 1}]
    divided = SGD(_groups({"params": [B]}, {"params": []}, {"params": [A]}, {"params": [C]}), lr=0.1)
    assert _loaded(divided, saved) == [{"lr": 2}, {}, {"lr": 1}, {"lr": 2}]


def test_parameters_of_other_groups_are_refused() -> None:
    saved = [SavedGroup({"lr": 1}, ["a"]), SavedGroup({"lr": 2}, ["b"])]
    with pytest.raises(ValueError, match=r"did not have c of param_groups\[1\]"):
        _loaded(SGD(_groups({"params": [A]}, {"params": [B, C]}), lr=0.1), saved)
    with pytest.raises(ValueError, match=r"param_groups\[0\] has a and b, whose lr differs in the checkpoint: 1 and 2"):
        _loaded(SGD([A, B], lr=0.1), saved)


def test_groups_that_divide_a_saved_one_have_equal_options_but_for_the_rate() -> None:
    saved = [SavedGroup({}, ["a", "b"]), SavedGroup({}, ["c"])]
    a, b, c = (SavedGroup({"lr": 1, "decay": 0}, [name]) for name in "abc")
    assert check_divided([[a], [SavedGroup({}, []), b], [c._replace(options={"decay": 5})]], saved) == []
    assert check_divided([[a], [b._replace(options={"lr": 2, "decay": 0})]], saved) == ["a", "b"]
    with pytest.raises(ValueError, match="a and b are in groups with decay=0 and 5, and were in one group of the chec"):
        check_divided([[a, c], [b._replace(options={"lr": 1, "decay": 5})]], saved)


@pytest.mark.parametrize(
    "change", [{"lr": "x"}, {"lr": None}, {"lr": True}, {"betas": 0.9}, {"betas": {"$tuple": [1]}}]
)
def test_an_option_that_is_no_number_is_refused(change: dict[str, Any]) -> None:
    optimizer = AdamW(_groups({"params": [A], "mine": [1, 2], "rate": torch.tensor(1.0)}), lr=0.2)
    saved = groups_of(optimizer, NAMES)[0]
    with pytest.raises(ValueError, match=rf"param_groups\[0\] of the checkpoint has {next(iter(change))}=.*, and the"):
        _loaded(optimizer, [SavedGroup(saved.options | change, saved.names)])
    others = {"rate": 2, "lr": 1, "mine": "text", "foreach": True, "betas": {"$tuple": [0, 0.5]}}
    (options,) = _loaded(optimizer, [SavedGroup(saved.options | others, saved.names)])
    assert options["betas"] == (0, 0.5)
