"""Values as JSON: they come back with their types, others are refused with their path, and no code runs."""

import json
import math
from collections import Counter, OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from nxdpp.checkpoint.distributed.structured import (
    decoded,
    dtype_named,
    encoded,
    is_scalar,
    read_scalar,
    written_scalar,
)


def round_trip(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encoded(value, "content", tensors), allow_nan=False)
    return decoded(json.loads(text), tensors)


VALUES: list[Any] = [
    None, True, False, 0, -(2**70), "", "text \u00e9 \ud7ff", 0.1, -0.0, 5e-324, 1e308, math.inf, -math.inf,
    b"", b"\0\xff",
    [], {}, (), [1, [2, (3, {"a": None})]], {"a": {"b": [True]}}, {1: "a", "1": "b", None: 2, (1, 2): 3, 2.5: 4},
    {"$tuple": [1]}, {"a": 1, "$set": 2}, {"$": {}}, {"": 1}, {1, "a", (2, 3)}, frozenset({1}), torch.Size([2, 3]),
    Counter("aab"), Counter({3: 1}), OrderedDict([("b", 1), ("a", 2)]), OrderedDict([((1,), 1)]), torch.float8_e4m3fn,
    torch.device("cpu"), torch.device("cuda", 3), {"nested": ({"deep": {(): {"$dict": []}}},)},
]  # fmt: skip


def test_values_come_back_with_their_types() -> None:
    for value in VALUES:
        found = round_trip(value)
        assert found == value
        assert type(found) is type(value)
        assert repr(found) == repr(value) or isinstance(value, set | frozenset)
    assert math.isnan(round_trip(math.nan))


SCALARS = [
    torch.tensor(0.1), torch.tensor(0.1, dtype=torch.bfloat16), torch.tensor(3.0, dtype=torch.float8_e5m2),
    torch.tensor(-math.inf), torch.tensor(2**63 - 1), torch.tensor(True), torch.tensor(1e-45), torch.tensor(-0.0),
    True, 2**80, 0.1, -0.0, math.inf,
]  # fmt: skip


def test_numbers_of_an_optimizer_come_back() -> None:
    for value in SCALARS:
        assert is_scalar(value)
        found: Any = read_scalar(json.loads(json.dumps(written_scalar(value), allow_nan=False)), torch.device("cpu"))
        assert (type(found), repr(found)) == (type(value), repr(value))
        assert getattr(found, "dtype", None) == getattr(value, "dtype", None)
    assert not any(map(is_scalar, (torch.zeros(1), torch.tensor(1j), "text", [1], 1j)))
    for name in ("nn", "load", "", "torch.float32", "__dict__"):
        with pytest.raises(ValueError, match="is not a dtype of torch"):
            dtype_named(name)


def test_tensors_and_arrays_come_back() -> None:
    value: dict[str, Any] = {
        "mask": torch.arange(6).view(2, 3),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "array": np.arange(3.0),
        "reversed": np.arange(3)[::-1],
        "list": [torch.zeros(0)],
        "number": torch.tensor(0.1),
        "complex": torch.tensor(1j),
    }
    found = round_trip(value)
    assert list(found) == list(value)
    for key in ("mask", "half", "number", "complex"):
        assert torch.equal(found[key], value[key])
        assert found[key].dtype == value[key].dtype
    for key in ("array", "reversed"):
        assert np.array_equal(found[key], value[key])
        assert found[key].dtype == value[key].dtype
    assert found["list"][0].shape == (0,)


def nested(levels: int, wrap: Any) -> Any:
    value = None
    for _ in range(levels):
        value = wrap(value)
    return value


def test_tensors_with_the_same_path_stay_apart() -> None:
    one, two = torch.ones(1), torch.zeros(2)
    values: list[Any] = [
        {"a.b": one, "a": {"b": two}},
        {"a[0]": one, "a": [two]},
        {"a": {1: one}, "a[1]": two},
        {"a.b": one.numpy(), "a": {"b": two}},
    ]
    for value in values:
        first, second = round_trip(value).values()
        assert {tuple(each.shape) for each in (*_leaves(first), *_leaves(second))} == {(1,), (2,)}


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else [value]


class Point(NamedTuple):
    x: int


OTHERS: list[tuple[Any, str]] = [
    ({"a": [0, object()]}, r"content\.a\[1\] is a object"),
    ({"a": {2: print}}, r"content\.a\[2\] is a builtin_function_or_method"),
    ([Point(1)], r"content\[0\] is a Point"),
    ([np.ma.array([1, 2], mask=[False, True])], r"content\[0\] is a MaskedArray"),
    ({"a": torch.eye(2).to_sparse()}, r"content\.a is a tensor of layout torch\.sparse_coo"),
    (torch.zeros(1, device="meta"), r"content is a tensor on the meta device"),
]


def test_other_values_are_refused_with_their_path() -> None:
    for value, message in OTHERS:
        with pytest.raises(ValueError, match=message):
            encoded(value, "content", {})
