"""Hashes of inputs are equal for equal values alone, and late for inputs on a device."""

from typing import Any

import pytest
import torch

from nxdpp.agreement import input_hash
from nxdpp.agreement.input_hash import InputHasher, hash_of
from nxdpp.agreement.same_values import hash_of_all, sample
from tests.support import fake_device
from tests.support.run_ranks import run_ranks

DTYPES = [torch.bool, torch.int64, torch.float8_e4m3fn, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_other_element_makes_another_hash(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = torch.randint(0, 2, (5, 7)).to(dtype)
    same = hash_of(tensor)
    assert hash_of(tensor.clone()) == same
    # Other strides and another offset in memory hold the same values.
    assert hash_of(tensor.t().contiguous().t()) == same
    assert hash_of(torch.cat([tensor[:1], tensor])[1:]) == same
    for place in range(tensor.numel()):
        other = tensor.to(torch.float32 if dtype.is_floating_point else torch.int64)
        other.view(-1)[place] = 1 - other.view(-1)[place]
        assert hash_of(other.to(dtype)) != same


def batch(**changes: Any) -> dict[str, Any]:
    return {"ids": torch.arange(4), "mask": torch.ones(4, dtype=torch.bool), "pixels": torch.ones(3)} | changes


def different(check: str, is_first: bool, **changes: Any) -> list[str]:
    ours = InputHasher(check).of_step([batch()], is_first)
    theirs = InputHasher(check).of_step([batch(**changes)], is_first)
    now, before = ours.different(theirs.words())
    assert not before
    return now


def test_integers_are_compared_in_every_step_and_floats_as_set() -> None:
    for check in ("first", "always", "never"):
        for is_first in (True, False):
            assert different(check, is_first, ids=torch.arange(1, 5)) == ["ids"]
            assert different(check, is_first, mask=torch.zeros(4, dtype=torch.bool)) == ["mask"]
            assert different(check, is_first, pixels=torch.zeros(3)) == ([] if check == "never" else ["pixels"])
            assert different(check, is_first) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_a_sample_of_floats_is_compared_in_later_steps(dtype: torch.dtype) -> None:
    def hashed(check: str, pixels: torch.Tensor) -> list[int]:
        return InputHasher(check).of_step([{"pixels": pixels}], is_first=False).words()

    rows = torch.randn(64, 3, 16, 16, dtype=dtype, generator=torch.Generator().manual_seed(0))
    one = rows.clone()
    one[5, 1, 2, 3] += 1
    for each in (rows, rows.transpose(0, 1), rows[:, ::2]):
        assert hashed("first", each) == hashed("first", each.clone())
        assert hashed("first", each) != hashed("first", each.flip(0))
    for size in (39, 64, 96):
        tensor = torch.zeros(64, size, dtype=dtype)
        tensor[:, 1:] += 1
        assert hashed("first", tensor) != hashed("first", torch.zeros(64, size, dtype=dtype))
    # No sample of 64 of the 49,152 elements has this one.
    assert hashed("first", rows) == hashed("first", one)
    assert hashed("always", rows) != hashed("always", one)


def test_numbers_are_compared_and_texts_are_not() -> None:
    def words(**inputs: Any) -> list[int]:
        return InputHasher("first").of_step([inputs], is_first=False).words()

    assert words(rate=0.5) != words(rate=0.25)
    assert words(rate=float("nan")) == words(rate=float("nan"))
    assert words(mode="a") == words(mode="b") == words(flag=True) == words()


def composed(rows: torch.Tensor) -> list[torch.Tensor]:
    layouts = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc]
    nested = [torch.nested.nested_tensor([rows, rows[:1]], layout=layout) for layout in (torch.jagged, torch.strided)]
    blocks = [rows.to_sparse(layout=layout, blocksize=(1, 1)) for layout in (torch.sparse_bsr, torch.sparse_bsc)]
    return [*(rows.to_sparse(layout=layout) for layout in layouts), *nested, *blocks]


def test_sparse_and_nested_tensors_are_compared() -> None:
    def words(value: torch.Tensor, check: str = "always") -> list[int]:
        return InputHasher(check).of_step([{"x": value}], is_first=True).words()

    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    for own, same, moved, scaled in zip(
        composed(rows), composed(rows.clone()), composed(rows.flip(0)), composed(rows * 2), strict=True
    ):
        assert words(own) == words(same)
        assert words(own) != words(moved)
        assert words(own) != words(scaled)
        assert words(own, "never") == words(scaled, "never")


def on_device(value: Any) -> torch.Tensor:
    """A hash as a device other than the CPU gives it."""
    return torch.tensor(hash_of(value))


def test_inputs_on_a_device_are_compared_a_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    hashers = [InputHasher("first") for _ in range(2)]
    monkeypatch.setattr(input_hash, "hash_of", on_device)

    def step(is_first: bool, *values: int) -> tuple[list[str], list[str]]:
        given = [[{"ids": torch.tensor([value])}] for value in values]
        ours, theirs = (hasher.of_step(each, is_first) for hasher, each in zip(hashers, given, strict=True))
        return ours.different(theirs.words())

    # A first step waits for its hashes.
    assert step(True, 1, 2) == (["ids"], [])
    assert step(False, 1, 2) == ([], [])
    assert step(False, 3, 3) == ([], ["ids"])
    assert step(False, 4, 4) == ([], [])
    assert step(True, 5, 5) == ([], [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changes_that_cancel_in_a_sum_change_the_hash_of_all_elements(dtype: torch.dtype) -> None:
    tensor = torch.arange(10_000).to(dtype)
    swapped = tensor.clone()
    swapped[[4, 5]] = tensor[[5, 4]]
    assert sample(swapped) == sample(tensor)
    assert hash_of_all(swapped) != hash_of_all(tensor) == hash_of_all(tensor.view(100, 100).t().clone().t())


def hashed_late(rank: int) -> list[list[str]]:
    """The waits of the host in steps of inputs on a device, whose hashes are those of the host."""
    fake_device.install()
    steps = [{"ids": torch.arange(start, start + 6), "mask": torch.arange(7) < start} for start in (1, 2, 3)]
    given = [[{name: value.to("fake") for name, value in step.items()}] for step in steps]
    hasher = InputHasher("first")
    found: list[list[int]] = []
    waited: list[list[str]] = []
    for number, step in enumerate(given):
        with fake_device.host_waits() as waits:
            hashes = hasher.of_step(step, is_first=number == 0)
        found.append([*hashes.values, *hashes.late_values])
        waited.append([f"{count} {place.partition(' ')[0]}" for place, count in waits.items()])
    expected = [[hash_of(step[name]) for name in ("ids", "mask")] for step in steps]
    assert found == [expected[0], [], expected[1]], (found, expected)
    return waited


REASON = fake_device.why_not()


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_a_step_waits_for_the_hashes_of_the_step_before_and_not_for_its_own() -> None:
    fake_device.built()
    # The first step of a signature waits for its own. An event is behind the copy, and before the work of the step.
    assert run_ranks(1, hashed_late) == [[["1 event.synchronize"], [], ["1 event.synchronize"]]]
