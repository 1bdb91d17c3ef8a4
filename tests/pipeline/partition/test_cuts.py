"""Even cuts, given cuts, and errors for invalid cuts."""

import pytest

from nxdpp.pipeline.partition.cuts import check_cuts, even_cuts, stages_of_layers


def _layers(count: int) -> list[str]:
    return [f"model.layers.{index}" for index in range(count)]


LAYERS = _layers(6)
LISTED = ", ".join(LAYERS)


@pytest.mark.parametrize(
    ("layers", "stages", "cuts"),
    [
        (10, 4, [1, 3, 6]),
        (19, 4, [3, 8, 13]),
        (11, 8, [0, 1, 2, 3, 4, 6, 8]),
        (8, 4, [1, 3, 5]),
        (4, 4, [0, 1, 2]),
        (5, 1, []),
    ],
)
def test_even_cuts_leave_the_remainder_to_the_later_stages(layers: int, stages: int, cuts: list[int]) -> None:
    assert even_cuts(_layers(layers), stages) == [f"model.layers.{cut}" for cut in cuts]


@pytest.mark.parametrize("stages", range(1, 9))
def test_even_stages_differ_by_one_layer_at_most(stages: int) -> None:
    for layers in range(stages, 30):
        names = _layers(layers)
        layer_stages = stages_of_layers(even_cuts(names, stages), names)

        sizes = [list(layer_stages.values()).count(stage) for stage in range(stages)]

        assert sum(sizes) == layers
        assert sizes == sorted(sizes)
        assert sizes[-1] - sizes[0] <= 1


def test_a_cut_falls_after_the_named_layer() -> None:
    assert list(stages_of_layers(["model.layers.0", "model.layers.3"], LAYERS).items()) == [
        ("model.layers.0", 0),
        ("model.layers.1", 1),
        ("model.layers.2", 1),
        ("model.layers.3", 1),
        ("model.layers.4", 2),
        ("model.layers.5", 2),
    ]


def test_cuts_are_taken_in_the_order_of_the_layers() -> None:
    layers = _layers(12)

    assert check_cuts(["model.layers.10", "model.layers.2"], layers, 3) == ["model.layers.2", "model.layers.10"]
    assert check_cuts([], layers, 1) == []
    assert check_cuts(("model.layers.4",), layers, 2) == ["model.layers.4"]


def _refusal(cuts: list[str], stages: int, layers: list[str] = LAYERS) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        check_cuts(cuts, layers, stages)
    return str(caught.value)


def test_an_unknown_name() -> None:
    message = _refusal(["model.layers.1", "layers.2"], 3)

    assert "['layers.2'] (did you mean 'model.layers.2'?), which are no transformer layers" in message
    assert LISTED in message


def test_a_repeated_name() -> None:
    message = _refusal(["model.layers.1", "model.layers.1"], 3)

    assert "['model.layers.1'] more than once" in message


@pytest.mark.parametrize("cuts", [[], ["model.layers.1"], [f"model.layers.{index}" for index in range(3)]])
def test_a_wrong_number_of_cuts(cuts: list[str]) -> None:
    message = _refusal(cuts, 3)

    assert f"{len(cuts)} names, but 3 stages need 2 cuts" in message
    assert f"Given: {cuts}" in message
    assert LISTED in message


def test_a_cut_after_the_last_layer_leaves_a_stage_without_layers() -> None:
    cuts = check_cuts(["model.layers.5", "model.layers.1"], LAYERS, 3)

    assert cuts == ["model.layers.1", "model.layers.5"]
    assert set(stages_of_layers(cuts, LAYERS).values()) == {0, 1}
    assert check_cuts(LAYERS, LAYERS, 7) == LAYERS


def test_fewer_layers_than_stages() -> None:
    message = _refusal([], 8).replace("8 pipeline", "7 pipeline")
    with pytest.raises(ValueError, match="6 transformer layers cannot be split over 7 pipeline stages") as caught:
        even_cuts(LAYERS, 7)

    assert message == str(caught.value)
    assert "Use at most 6 stages" in message
    assert LISTED in message
