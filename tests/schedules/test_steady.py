"""Extrapolated makespans against the simulation of the whole schedule."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxdpp.schedules.execution import Times
from nxdpp.schedules.families import family as family_module
from nxdpp.schedules.families.registry import FAMILIES
from nxdpp.schedules.simulate import simulate
from nxdpp.schedules.steady import steady_makespan
from tests.schedules.pipelines import chunks_of


def _compare(name: str, ranks: int, microbatches: int, chunks: int, times: Times, tolerance: float) -> None:
    family = FAMILIES[name]
    whole = simulate(family.build(ranks, microbatches, chunks), *times).makespan

    assert steady_makespan(family, ranks, microbatches, chunks, times) == pytest.approx(whole, rel=tolerance)


@given(
    data=st.data(),
    name=st.sampled_from(list(FAMILIES)),
    ranks=st.integers(1, 5),
    microbatches=st.integers(1, 90),
    each=st.tuples(*[st.integers(10, 15)] * 3, st.integers(0, 5)),
    head=st.integers(0, 30),
)
@settings(max_examples=80, deadline=None)
def test_equal_stages_and_a_head(
    data: st.DataObject, name: str, ranks: int, microbatches: int, each: tuple[int, ...], head: int
) -> None:
    chunks = data.draw(chunks_of(FAMILIES[name], 3))
    forward, input_gradient, weight_gradient, transfer = ([float(time)] * ranks * chunks for time in each)
    for times in (forward, input_gradient, weight_gradient):
        times[-1] += head
    _compare(name, ranks, microbatches, chunks, Times(forward, input_gradient, weight_gradient, transfer), 1e-9)


@given(data=st.data(), name=st.sampled_from(list(FAMILIES)), ranks=st.integers(1, 5), microbatches=st.integers(1, 90))
@settings(max_examples=60, deadline=None)
def test_any_times(data: st.DataObject, name: str, ranks: int, microbatches: int) -> None:
    chunks = data.draw(chunks_of(FAMILIES[name], 3))
    each = st.lists(st.integers(1, 9).map(float), min_size=ranks * chunks, max_size=ranks * chunks)
    _compare(name, ranks, microbatches, chunks, Times(*(data.draw(each) for _ in range(4))), 0.05)


def test_many_microbatches_build_short_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    build = family_module.Family.build

    def watched(self: family_module.Family, ranks: int, microbatches: int, chunks: int | None = None) -> object:
        built.append(microbatches)
        return build(self, ranks, microbatches, chunks)

    monkeypatch.setattr(family_module.Family, "build", watched)
    makespan = steady_makespan(FAMILIES["1f1b"], 4, 100_000, None, Times([1.0] * 4, [1.0] * 4, [1.0] * 4, [0.0] * 4))

    assert makespan == 3 * (100_000 + 3)
    assert built == [12, 16, 20]


def test_numbers_that_the_family_does_not_have() -> None:
    times = Times([1.0] * 4, [1.0] * 4, [1.0] * 4, [0.0] * 4)

    with pytest.raises(ValueError, match="1f1b has 1 stage per rank, not 2"):
        steady_makespan(FAMILIES["1f1b"], 2, 100, 2, times)
    with pytest.raises(ValueError, match="a step has at least 1 microbatch, not 0"):
        steady_makespan(FAMILIES["1f1b"], 4, 0, None, times)
