"""The state that code can reach is found by the names in the code, compared and put back."""

import itertools
import threading
from collections import Counter, UserDict, defaultdict, deque
from collections.abc import Callable
from contextvars import ContextVar
from functools import cached_property, partial, wraps
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp.tracing.state.reachable_state import DataWalk, ReachableState, differences, has_user_code

NAMED: dict[str, Any] = {"n": 0}
UNNAMED = {"n": 0}
BEHIND_A_FUNCTION: list[int] = []
OF_A_METHOD: list[int] = []
OF_A_LAYER: list[int] = []
OF_A_THREAD = threading.local()
OF_A_THREAD.items = []
OF_A_CONTEXT: ContextVar[int] = ContextVar("of_a_context", default=0)
OF_A_CONTEXT.set(1)
_SINGLETON: Any = None


class Manager:
    """An object behind a function."""

    def __init__(self) -> None:
        self.items: list[int] = []
        self.unnamed: list[int] = []

    def total(self) -> int:
        return len(self.items) + len(OF_A_METHOD)

    def never_called(self) -> int:
        return len(self.unnamed)


class Slotted:
    """An object without a dict."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: list[int] = []


def manager() -> Manager:
    global _SINGLETON
    if _SINGLETON is None:
        _SINGLETON = Manager()
    return _SINGLETON  # type: ignore[no-any-return]


def behind(value: int) -> int:
    return value + len(BEHIND_A_FUNCTION)


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    return call


class Layer(nn.Module):
    def forward(self, x: Any) -> Any:
        OF_A_LAYER.append(1)
        return x


class Spine(nn.Module):
    """Reads state of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer()])
        self.items: Any = [1, [2]]
        self.mapping: Any = {"a": {"b": [1]}, "c": (1, [2])}
        self.members = {1, 2}
        self.queue = deque([1], maxlen=4)
        self.counts = Counter("ab")
        self.lists: Any = defaultdict(list)
        self.shared: Any = UserDict(a=1)
        self.settings = SimpleNamespace(deep=SimpleNamespace(n=1))
        self.slotted = Slotted()
        self.array = numpy.zeros(3)
        self.random = Random(0)
        self.numpy_random = numpy.random.default_rng(0)
        self.legacy_random = numpy.random.RandomState(0)
        self.generator = torch.Generator()
        self.numbers = itertools.count(3)
        self.iterator = iter([1, 2, 3])
        self.bound = partial(behind, 1)
        self.unnamed: list[int] = []

    @property
    def length(self) -> int:
        return len(self.items)

    @cached_property
    def cached(self) -> Any:
        return self.mapping

    @decorated
    def read(self) -> Any:
        return (
            self.length, self.cached, self.members, self.queue, self.counts, self.lists, self.shared,
            self.slotted.items, self.settings.deep.n, self.array, self.random, self.numpy_random,
            self.legacy_random, self.generator, self.numbers, self.iterator, self.bound,
        )  # fmt: skip

    def forward(self, x: Any) -> Any:
        self.read()
        return x * NAMED["n"] * manager().total() * len(OF_A_THREAD.items) * OF_A_CONTEXT.get()


def change_member(spine: Any) -> None:
    spine.members.add(3)


def change_array(spine: Any) -> None:
    spine.array += 1


def change_setting(spine: Any) -> None:
    spine.settings.deep.n = 2


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a list": lambda spine: spine.items.append(3),
    "a list in a list": lambda spine: spine.items[1].append(3),
    "another list": lambda spine: setattr(spine, "items", [7]),
    "a list in a dict": lambda spine: spine.mapping["a"]["b"].append(2),
    "a list in a tuple": lambda spine: spine.mapping["c"][1].clear(),
    "an entry": lambda spine: spine.mapping.update(a=0),
    "a new entry": lambda spine: spine.mapping.update(z=0),
    "True for 1": lambda spine: spine.items.__setitem__(0, True),
    "a set": change_member,
    "a deque": lambda spine: spine.queue.append(2),
    "a counter": lambda spine: spine.counts.update("a"),
    "a default": lambda spine: spine.lists["new"].append(1),
    "a shared mapping": lambda spine: spine.shared.update(b=1),
    "an attribute of an attribute": change_setting,
    "a slot": lambda spine: spine.slotted.items.append(1),
    "an array": change_array,
    "a generator": lambda spine: spine.random.random(),
    "a generator of NumPy": lambda spine: spine.numpy_random.random(),
    "an old generator of NumPy": lambda spine: spine.legacy_random.rand(),
    "a generator of torch": lambda spine: torch.rand(1, generator=spine.generator),
    "a count": lambda spine: next(spine.numbers),
    "a global": lambda spine: NAMED.update(n=1),
    "a global of a function": lambda spine: BEHIND_A_FUNCTION.append(1),
    "an object behind a function": lambda spine: manager().items.append(1),
    "a global of a method": lambda spine: OF_A_METHOD.append(1),
    "an item of a thread": lambda spine: OF_A_THREAD.items.append(1),
    "an attribute of a thread": lambda spine: setattr(OF_A_THREAD, "items", [7]),
    "a value of a context": lambda spine: OF_A_CONTEXT.set(2),
}


@pytest.fixture(autouse=True)
def _singleton() -> None:
    manager()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_found_and_put_back(change: Callable[[Any], Any]) -> None:
    spine = Spine()
    state = ReachableState([spine])
    before = state.snapshot()
    assert not differences(before, state.snapshot())

    change(spine)
    assert differences(before, state.snapshot())

    before.restore()
    assert not differences(before, state.snapshot())


def test_an_iterator_is_compared() -> None:
    spine = Spine()
    state = ReachableState([spine])
    before = state.snapshot()
    next(spine.iterator)
    assert [str(change) for change in differences(before, state.snapshot())]


@pytest.mark.parametrize(
    "change",
    [
        lambda spine: spine.unnamed.append(1),
        lambda spine: UNNAMED.update(n=1),
        lambda spine: manager().unnamed.append(1),
        lambda spine: OF_A_LAYER.append(1),
        lambda spine: spine.layers[0].__dict__.update(calls=1),
    ],
    ids=["attribute", "global", "of an object", "of a layer's code", "layer"],
)
def test_a_change_that_code_does_not_name_is_not_found(change: Callable[[Any], Any]) -> None:
    spine = Spine()
    state = ReachableState([spine])
    before = state.snapshot()
    change(spine)
    assert not differences(before, state.snapshot())


class ReadsItsLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer()])
        self.own: list[int] = []
        layer: Any = self.layers[0]
        layer.losses, layer.state, layer.own, layer.stored = [], {"a": SimpleNamespace(n=1)}, [], []

    def forward(self, x: Any) -> Any:
        return [(layer.losses, layer.state) for layer in self.layers], self.own


def test_containers_of_layers_that_code_names_are_found() -> None:
    spine = ReadsItsLayers()
    state = ReachableState([spine, spine.layers])
    for change in ("losses", "state", "own"):
        before = state.snapshot()
        layer: Any = spine.layers[0]
        layer.own.append(1)
        if change != "own":
            getattr(layer, change).clear() if change == "state" else layer.losses.append(1)
        changed = [difference.path for difference in differences(before, state.snapshot())]
        assert all(path.startswith(f"ReadsItsLayers.layers.0.{change}") for path in changed)
        assert bool(changed) == (change != "own")
        before.restore()
        assert not differences(before, state.snapshot())


def test_an_object_that_a_run_makes_is_forgotten() -> None:
    global _SINGLETON
    _SINGLETON = None
    state = ReachableState([Spine()])
    with state.put_back():
        manager().items.append(1)
    assert _SINGLETON is None


def test_circles_and_large_containers_are_walked_once() -> None:
    spine = Spine()
    spine.items.append(spine.items)
    spine.mapping["large"] = list(range(100_000))
    spine.settings.deep.n = spine.settings
    state = ReachableState([spine])
    before = state.snapshot()
    spine.mapping["large"].append(1)
    (change,) = differences(before, state.snapshot())
    assert str(change) == "Spine.mapping['large'] (a list of 100000, then a list of 100001)"
    before.restore()
    assert len(spine.mapping["large"]) == 100_000


class Asserts(nn.Module):
    def forward(self, x: Any) -> Any:
        assert x is not None
        return x


def test_the_calls_that_pytest_writes_into_an_assertion_are_not_walked() -> None:
    """They reach its configuration and the reports of all tests."""
    found = ReachableState([Asserts()]).snapshot()
    assert list(found.functions) == [Asserts.forward]
    assert not [path for path, _ in found.keys if "pytest" in path]


def test_nothing_of_torch_and_transformers_is_code_of_the_user() -> None:
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    llama = LlamaForCausalLM(config)
    assert not has_user_code([llama, llama.model, llama.model.layers])
    assert not has_user_code([nn.Sequential(Layer())])
    assert has_user_code([llama, Spine()])
    llama.register_forward_hook(lambda module, inputs, output: output)
    assert has_user_code([llama])


def test_data_are_compared_without_changes_of_tensors_in_place() -> None:
    tensor = torch.zeros(2)
    data: dict[str, Any] = {"given": {"x": tensor, "settings": SimpleNamespace(n=1)}}
    before = DataWalk(data)
    tensor.add_(1)
    assert not differences(before, DataWalk(data))
    data["given"]["settings"].n = 2
    assert differences(before, DataWalk(data))
