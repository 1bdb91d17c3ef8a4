"""Unknown keywords are refused with the name that was meant."""

import inspect
from typing import Any

import pytest

from nxdpp import NxDPPModel, parallel_state
from nxdpp.ranks.known_keywords import knows_its_keywords
from tests.support.traced_models import PlainModel


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("num_micro_batches", " (did you mean 'num_microbatches'?)"),
        ("Transformer_Layer_Class", " (did you mean 'transformer_layer_cls'?)"),
        ("loss_function", " (did you mean 'loss_fn'?)"),
        ("zzz", ""),
    ],
)
def test_constructors(name: str, meant: str) -> None:
    unknown: dict[str, Any] = {name: 2}
    message = f"takes no {name}{meant}. help("
    with pytest.raises(TypeError) as caught:
        NxDPPModel(PlainModel(), **unknown)
    assert str(caught.value) == f"NxDPPModel {message}NxDPPModel) has its arguments."


def test_two_at_once_and_functions() -> None:
    both: dict[str, Any] = {"num_microbatch": 2, "schedul": "gpipe"}
    with pytest.raises(TypeError, match=r"no num_microbatch \(.*num_microbatches'\?\), schedul \(.*'schedule'\?\)\."):
        NxDPPModel(PlainModel(), **both)
    other: dict[str, Any] = {"pipeline_parallel_size": 1}
    for start in (parallel_state.initialize_model_parallel, parallel_state.initialize_debug):
        with pytest.raises(
            TypeError, match=r"size \(did you mean 'pipeline_model_parallel_size'\?\)\. help\(initialize"
        ):
            start(**other)
    assert not parallel_state.model_parallel_is_initialized()


def test_signatures_stay() -> None:
    assert {"module", "num_microbatches", "loss_fn"} <= set(inspect.signature(NxDPPModel).parameters)

    @knows_its_keywords
    def taken(first: int, /, second: int = 2, *others: int, third: int = 3) -> list[int]:
        """Return the arguments."""
        return [first, second, *others, third]

    assert taken(1, 5, 6, third=7) == [1, 5, 6, 7]
    assert taken.__doc__ == "Return the arguments."
    with pytest.raises(TypeError, match="taken takes no fist"):
        taken(1, fist=2)  # type: ignore[call-arg]  # the mistake
