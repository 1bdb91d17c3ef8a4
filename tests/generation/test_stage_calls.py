"""Models whose spines, caches or outputs are unlike Llama's, on ranks that are threads."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from nxdpp.generation.absent import (
    AbsentTensor,
    ShapelessTensor,
    leaves_in,
    mapped,
    roots_of,
    tracked_as,
)
from nxdpp.generation.generating_rank import few_tokens
from nxdpp.generation.known_calls import KnownCall, rule_of
from nxdpp.ranks.faults import failure_watch
from tests.generation.generated_models import MODELS, prompt
from tests.support import generating_threads
from tests.support.generating_threads import generate_on_threads
from tests.support.models import VOCABULARY
from tools.zoo import build
from tools.zoo.comparison import without_randomness

_TYPES = ("gemma3_text", "jamba", "bart")
_SETTINGS: dict[str, Any] = {
    "max_new_tokens": 4,
    "num_beams": 2,
    "pad_token_id": 0,
    "return_dict_in_generate": True,
    "output_logits": True,
}
_ROOTS = frozenset({("embedding", 0, 0)})


@pytest.mark.parametrize("name", _TYPES)
def test_tokens_and_logits_equal_one_process(name: str) -> None:
    model: Any = build("seq2seq-lm" if name == "bart" else "causal-lm", name).eval()
    without_randomness(model)
    mask = torch.ones_like(prompt(2))
    mask[0, :2] = 0
    given = {"input_ids": prompt(2), "attention_mask": mask, **_SETTINGS}
    expected = copy.deepcopy(model).generate(**given)

    first, *_, last = generate_on_threads(model, 2, given)

    assert torch.equal(first["sequences"], expected["sequences"])
    assert all(map(torch.equal, last["logits"], expected["logits"]))


def test_a_spine_that_reads_a_value_of_another_rank_is_refused() -> None:
    class ReadsMean(type(MODELS["llama"]())):  # type: ignore[misc]  # a class that a call returns
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * self.model.embed_tokens(kwargs["input_ids"]).mean().item()
            return output

    model = MODELS["llama"]()
    model.__class__ = ReadsMean
    with pytest.raises(RuntimeError, match=r"takes a result of model.embed_tokens.*reads its values \(item\)"):
        generate_on_threads(model.eval(), 2, {"input_ids": prompt(2), "max_new_tokens": 3})


def test_a_long_prompt_is_planned_on_few_tokens() -> None:
    model, ids = MODELS["llama"]().eval(), prompt(3, 100)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids).index_fill(1, torch.tensor([0]), 0)}
    cache = DynamicCache(config=model.config)

    few = few_tokens({**given, "past_key_values": cache, "use_cache": True}, ids)

    assert few["input_ids"].shape == few["attention_mask"].shape == (2, 3)
    assert few["past_key_values"] is not cache
    assert few_tokens({**given, "pixel_values": torch.ones(3, 4, 4)}, ids) == {}
    expected = copy.deepcopy(model).generate(**given, **_SETTINGS)
    found = generate_on_threads(model, 2, {**given, **_SETTINGS})
    assert all(map(torch.equal, found[-1]["logits"], expected["logits"]))


def test_reads_of_absent_values_are_refused() -> None:
    """And shapes that follow from them."""
    uses: list[Callable[[Any], Any]] = [
        lambda absent: absent.tolist(),
        torch.nonzero,
        np.asarray,
        lambda absent: torch.ones(2)[absent > 0],
        lambda absent: tracked_as(torch.ones(2), _ROOTS)[: absent[0].long()],
        lambda absent: torch.add(absent, 1, out=torch.ones(2)),
        lambda absent: torch.ones(2).__iadd__(absent),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="a result of embedding, which another rank runs"):
            use(tracked_as(torch.zeros(2), _ROOTS, AbsentTensor))
    with pytest.raises(RuntimeError, match="a result of embedding, which another rank runs"):
        nn.functional.relu(tracked_as(torch.zeros(1), _ROOTS, ShapelessTensor))


def _assign(known: Any, absent: Any) -> None:
    known[:, 0] = absent[:, 0]


def test_a_tensor_follows_from_what_is_written_into_it() -> None:
    writes: list[Callable[[Any, Any], Any]] = [
        lambda known, absent: known.__iadd__(absent),
        _assign,
        lambda known, absent: known[:, 0].mul_(absent[:, 0]),
        lambda known, absent: torch.add(known, absent, out=known),
    ]
    for write in writes:
        absent = tracked_as(torch.zeros(2, 3), _ROOTS, AbsentTensor)
        known = tracked_as(torch.ones(2, 3), frozenset({("norm", 0, 0)}))
        view: Any = known.T

        write(known, absent)

        assert roots_of([known]) == roots_of([view]) == {("embedding", 0, 0), ("norm", 0, 0)}
        assert type(known) is type(view) is type(view + 1) is AbsentTensor


def test_a_long_prompt_equals_one_process() -> None:
    model: Any = build("causal-lm", "zamba2").eval()
    without_randomness(model)
    given = {"input_ids": prompt(2, 140), **_SETTINGS}
    expected = copy.deepcopy(model).generate(**given)
    found = generate_on_threads(model, 2, given)
    assert all(map(torch.equal, found[-1]["logits"], expected["logits"]))


def test_logits_stay_on_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    first: list[Any] = []
    later: list[Any] = []

    def note(name: str, sent: list[Any]) -> None:
        original = getattr(generating_threads._Queues, name)

        def send(self: Any, value: Any, destination: int) -> None:
            sent.append(value)
            original(self, value, destination)

        monkeypatch.setattr(generating_threads._Queues, name, send)

    note("send_value", first)
    note("send", later)
    generate_on_threads(MODELS["llama"]().eval(), 2, {"input_ids": prompt(2), "max_new_tokens": 3})
    for sent in (first, later):
        shapes = [tuple(each.shape) for each in leaves_in(sent) if isinstance(each, torch.Tensor)]
        assert shapes
        assert not any(VOCABULARY in shape for shape in shapes)


def test_values_that_change_after_the_first_call_are_refused() -> None:
    first, executors = torch.zeros(2, 3), frozenset({0})
    known = KnownCall(0, executors, mapped(lambda each: rule_of(each, first), (first, 3)))
    assert len(known.check("layer", (first, 3), first)) == 1
    with pytest.raises(RuntimeError, match="layer returns 4, and other ranks expect 3"):
        known.check("layer", (first, 4), first)
    with pytest.raises(RuntimeError, match="layer returns 2 tensors and 0 other values"):
        known.check("layer", (first, first), first)


def test_an_interrupt_of_the_driver_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[BaseException] = []
    monkeypatch.setattr(failure_watch, "report", reported.append)

    def interrupt(*args: Any, **others: Any) -> None:
        raise KeyboardInterrupt

    given = {"input_ids": prompt(2), "max_new_tokens": 3, "stopping_criteria": [interrupt]}
    with pytest.raises(KeyboardInterrupt):
        generate_on_threads(MODELS["llama"]().eval(), 2, given)
    assert KeyboardInterrupt in map(type, reported)
