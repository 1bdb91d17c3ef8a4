"""Unknown keywords are refused with the name that was meant."""

from typing import Any

import pytest

from nxdpp import NxDPPModel, parallel_state
from tests.support.traced_models import PlainModel


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("num_micro_batches", " (did you mean 'num_microbatches'?)"),
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
