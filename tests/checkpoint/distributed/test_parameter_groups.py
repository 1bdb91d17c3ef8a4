"""Options of parameter groups, over ranks and by names."""

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from nxdpp.checkpoint.distributed.parameter_groups import SavedGroup, groups_of, joined_groups, new_options, regrouped

A, B, C = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
NAMES = {id(A): "a", id(B): "b", id(C): "c"}


def _groups(*groups: dict[str, Any]) -> list[dict[str, Any]]:
    return list(groups)


def test_options_come_back_with_their_types() -> None:
    optimizer = AdamW(_groups({"params": [A, C], "lr": torch.tensor(0.1)}, {"params": [B]}), lr=0.2, betas=(0.8, 0.9))
    saved = groups_of(optimizer, NAMES)
    assert [group.names for group in saved] == [["a", "c"], ["b"]]
    loaded = [SavedGroup(**group) for group in json.loads(json.dumps([group._asdict() for group in saved]))]
    for group, options in zip(optimizer.param_groups, new_options(optimizer, NAMES, loaded), strict=True):
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
        r"param_groups\[0\] has 1 parameters that .* shape \[2, 3\]: make the optimizer after the model is wrapped"
    )
    with pytest.raises(ValueError, match=sentence):
        groups_of(other, NAMES)
    with pytest.raises(ValueError, match=sentence):
        new_options(other, NAMES, [SavedGroup({"lr": 1}, ["a"])])


def test_groups_of_ranks_are_joined() -> None:
    ranks = [[SavedGroup({"lr": 1}, ["c"]), SavedGroup({"lr": 2}, [])], [SavedGroup({"lr": 1}, ["a", "c"])] * 1]
    ranks[1] = [ranks[1][0], SavedGroup({"lr": 2}, ["b"])]
    assert joined_groups(ranks) == [SavedGroup({"lr": 1}, ["a", "c"]), SavedGroup({"lr": 2}, ["b"])]


def test_groups_of_ranks_that_contradict_each_other_are_refused() -> None:
    one = SavedGroup({"lr": 1, "eps": 0}, [])
    with pytest.raises(ValueError, match="1 to 2 parameter groups on different ranks"):
        joined_groups([[one], [one, one]])
    with pytest.raises(ValueError, match=r"param_groups\[1\] has lr=1 on rank 0 and 3 on rank 2"):
        joined_groups([[one, one], [one, one], [one, SavedGroup({"lr": 3, "eps": 0}, [])]])
    with pytest.raises(ValueError, match=r"param_groups\[0\] has more=None on rank 0 and 1 on rank 1"):
        joined_groups([[one], [SavedGroup({"lr": 1, "eps": 0, "more": 1}, [])]])


def test_a_group_gets_its_saved_options() -> None:
    saved = [SavedGroup({"lr": 1}, ["a"]), SavedGroup({"lr": 2}, ["b", "c"])]
    own = SGD(_groups({"params": [A]}, {"params": [C]}), lr=0.1)
    assert new_options(own, NAMES, saved) == [{"lr": 1}, {"lr": 2}]
    without = SGD(_groups({"params": [A]}, {"params": []}), lr=0.1)
    assert new_options(without, NAMES, saved) == [{"lr": 1}, {"lr": 2}]


def test_parameters_of_other_groups_are_refused() -> None:
    saved = [SavedGroup({"lr": 1}, ["a"]), SavedGroup({"lr": 2}, ["b"])]
    with pytest.raises(ValueError, match=r"did not have c of param_groups\[1\]"):
        new_options(SGD(_groups({"params": [A]}, {"params": [B, C]}), lr=0.1), NAMES, saved)
    with pytest.raises(ValueError, match="has 1 parameter groups, and that of the checkpoint 2"):
        new_options(SGD([A, B], lr=0.1), NAMES, saved)
    with pytest.raises(ValueError, match=r"b is in param_groups\[0\], and was in param_groups\[1\]"):
        new_options(SGD(_groups({"params": [B]}, {"params": [A]}), lr=0.1), NAMES, saved)


@pytest.mark.parametrize(
    "change", [{"lr": "x"}, {"lr": None}, {"lr": True}, {"betas": 0.9}, {"betas": {"$tuple": [1]}}]
)
def test_an_option_that_is_no_number_is_refused(change: dict[str, Any]) -> None:
    optimizer = AdamW(_groups({"params": [A], "mine": [1, 2], "rate": torch.tensor(1.0)}), lr=0.2)
    saved = groups_of(optimizer, NAMES)[0]
    with pytest.raises(ValueError, match=rf"param_groups\[0\] of the checkpoint has {next(iter(change))}=.*, and the"):
        new_options(optimizer, NAMES, [SavedGroup(saved.options | change, saved.names)])
    others = {"rate": 2, "lr": 1, "mine": "text", "foreach": True, "betas": {"$tuple": [0, 0.5]}}
    (options,) = new_options(optimizer, NAMES, [SavedGroup(saved.options | others, saved.names)])
    assert options["betas"] == (0, 0.5)


def test_options_of_parameters_are_taken_into_the_groups_of_all_ranks() -> None:
    saved = [SavedGroup({"lr": 1}, ["b", "c", "d"]), SavedGroup({"lr": 2}, ["a"])]
    own = {"lr": 0}
    first = [SavedGroup(own, ["a"]), SavedGroup(own, []), SavedGroup(own, []), SavedGroup(own, ["new"])]
    second = [SavedGroup(own, []), SavedGroup(own, ["b"]), SavedGroup(own, []), SavedGroup(own, ["c"])]
    found = regrouped([first, second], saved)
    assert found == [
        SavedGroup({"lr": 2}, ["a"]),
        SavedGroup({"lr": 1}, ["b"]),
        SavedGroup(own, []),
        saved[0]._replace(names=["c"]),
    ]
    with pytest.raises(
        ValueError, match=r"param_groups\[0\] has a and b, whose options differ in the checkpoint: {'lr': 2}"
    ):
        regrouped([[SavedGroup(own, ["a"])], [SavedGroup(own, ["b"])]], saved)
