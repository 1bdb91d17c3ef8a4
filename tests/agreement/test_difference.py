"""Differences of two ranks' texts: short, of one kind, and of one name each."""

import pytest
from transformers import LlamaConfig

from nxdpp.agreement.difference import difference_of
from nxdpp.agreement.fingerprint import canonical, fingerprint

SETTING, OTHER_SETTING = "num_microbatches: 2", "num_microbatches: 4"
CONFIGURATION, OTHER_CONFIGURATION = "configuration rms_norm_eps: 1e-06", "configuration rms_norm_eps: 1e-05"
PARAMETER, OTHER_PARAMETER = "parameter weight: [4]", "parameter weight: [5]"
GRAPH, OTHER_GRAPH = "stage 0: f = call_function f(x)", "stage 1: f = call_function f(x)"
KINDS = [
    (SETTING, OTHER_SETTING, "other settings"),
    (CONFIGURATION, OTHER_CONFIGURATION, "another configuration"),
    ("attribute scale = 1.0", "attribute scale = 2.0", "other attributes"),
    (PARAMETER, OTHER_PARAMETER, "other parameters"),
    ("values of weight: 0a", "values of weight: 0b", "other parameters"),
    (GRAPH, OTHER_GRAPH, "another graph"),
]


def shown(theirs: list[str], ours: list[str]) -> str:
    return difference_of("rank 0", theirs, "rank 1", ours).lines


@pytest.mark.parametrize("first", range(len(KINDS)))
def test_the_first_kind_alone_is_shown(first: int) -> None:
    theirs = [line for line, _, _ in KINDS]
    ours = [other if number >= first else line for number, (line, other, _) in enumerate(KINDS)]
    difference = difference_of("rank 0", theirs, "rank 1", ours)
    line, other, has = KINDS[first]
    assert difference == (has, f"  rank 0: {line}\n  rank 1: {other}\n")
    assert difference.is_of_graph is (has == "another graph")


def test_many_differences_are_counted() -> None:
    theirs, ours = ([f"parameter {i}: [{size}]" for i in range(120)] for size in (1, 2))
    lines = shown(theirs, ours).splitlines()
    assert lines[:2] == ["  rank 0: parameter 0: [1]", "  rank 1: parameter 0: [2]"]
    assert len(lines) == 9
    assert lines[-1] == "  and 116 more"


def test_a_difference_of_configurations_is_short() -> None:
    texts = []
    for length in (64, 128):
        config = LlamaConfig(hidden_size=32, max_position_embeddings=length)
        lines = [f"stage 0: {name} = call_function {name}({canonical(config)})" for name in ("mask", "loss", "more")]
        texts.append(fingerprint(lines))
    assert len(texts[0].lines[0]) > 600

    difference = difference_of("rank 0", texts[0].lines, "rank 1", texts[1].lines)
    assert difference.has == "another graph"
    first, second = difference.lines.splitlines()
    assert first.startswith("  rank 0: stage 0: mask = call_function mask(... ")
    assert "'max_position_embeddings': 64" in first
    assert "'max_position_embeddings': 128" in second
    assert len(first) < 300
    assert "hidden_size" not in difference.lines
