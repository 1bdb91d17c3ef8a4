"""Values come back from their form as they were, and no form makes a reader run code."""

import json
import math
import os
import sys
import tempfile
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from enum import Enum, Flag
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from nxdpp.ranks.wire_form import packed, unpacked


class Colour(Enum):
    RED = 1


class Right(Flag):
    READ = 1
    WRITE = 2


class Pair(NamedTuple):
    first: int
    second: Any


@dataclass(frozen=True)
class Point:
    x: float
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        assert "RAN" not in os.environ, "a reader runs no code of a class"


@dataclass
class OfC(BaseException):
    """A dataclass on a class of C with a constructor of its own."""

    x: int


class Named(dict[str, int]):
    """A subclass with an attribute."""


VALUES: list[Any] = [
    *(None, True, 3, -(2**200), 1.5, math.inf, "text", "\ud800", b"", b"\0\xff", [], (), {}, set(), frozenset({1})),
    *({3: "a", (1, "b"): [2]}, {"tuple": [1]}, {"dict": {"bytes": 3}}, [(1, [2, (3,)])], complex(1, -2)),
    *(slice(None, 3), range(2, 9, 3), torch.float8_e4m3fn, torch.device("cuda", 1), torch.Size([2, 3]), torch.strided),
    *(torch.channels_last, np.float32(2.5), np.bool_(True), Path("/a/b"), Colour.RED, Pair(1, (2, None))),
    *(Point(1.0, ("a",)), OrderedDict(b=1, a=2), Named(a=1), ValueError, BaseModelOutput()),
    *(time.gmtime(3.5), os.terminal_size((80, 24)), Counter("aab"), Right.WRITE),
]


def test_a_value_comes_back_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = [packed(value) for value in VALUES]
    monkeypatch.setenv("RAN", "1")
    for value, form in zip(VALUES, forms, strict=True):
        back = unpacked(form)
        assert type(back) is type(value), value
        assert back == value
        assert getattr(back, "__dict__", None) == getattr(value, "__dict__", None)
    for tensor in (
        torch.arange(6).view(2, 3).T,
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]).conj(),
    ):
        back = unpacked(packed(tensor))
        assert (back.dtype, back.tolist()) == (tensor.dtype, tensor.tolist())


def test_a_value_without_a_form_is_refused_by_the_sender() -> None:
    class Local(NamedTuple):
        x: int

    # Values of plain classes that a reader could not make again.
    made_by_code: list[Any] = [sys.flags, sys.version_info, Right.READ | Right.WRITE, OfC(1)]
    others: list[Any] = [lambda: None, object(), Local(1), torch.nn.Linear(1, 1), torch.eye(2).to_sparse(), os, print]
    for value in others + made_by_code:
        with pytest.raises(TypeError, match="has no form in which it goes to other ranks"):
            packed([value])


def _form(content: Any) -> bytes:
    text = json.dumps(content).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "form",
    [
        *(b"", b"\x80\x04\x95", _form({})[:-1], _form({"what": 1}), _form({"dict": 1, "tuple": []})),
        *(_form({"bytes": [0, 5]}), _form({"bytes": [-1, 1]}), _form({"tensor": ["float32", [2], [0, 0]]})),
        *(_form({"dtype": "nn"}), _form({"dtype": "compile"}), _form({"tensor": ["Tensor", [1], [0, 0]]})),
        *(_form({"error": ["subprocess", "CalledProcessError"]}), _form({"error": ["os", "system"]})),
        _form({"raised": ["builtins", "eval", ["1"]]}),
        _form({"instance": ["os", "system", [], []]}),
        _form({"instance": ["subprocess", "Popen", None, [["args", "true"]]]}),
        _form({"instance": ["pathlib", "Path", None, []]}),
        _form({"instance": ["tempfile", "_TemporaryFileCloser", None, [["name", "/tmp/x"]]]}),
        *(_form({"instance": ["torch.return_types", "max", [1], []]}), _form({"instance": ["sys", "flags", [], []]})),
        _form({"instance": ["no.such.module", "X", None, []]}),
    ],
)
def test_a_strangers_bytes_are_refused(form: bytes) -> None:
    assert tempfile
    with pytest.raises(ValueError, match="sent bytes that are no value"):
        unpacked(form)
