"""Verdicts of a sweep: one line for each type, a summary, and the page."""

import pytest

from tests.zoo.page import page
from tests.zoo.sweep import Verdict, judge_types, summary

pytestmark = pytest.mark.zoo


def _judge(task: str, model_type: str) -> Verdict:
    if model_type == "mpt":
        raise KeyError(model_type)
    return Verdict("exact", "a | b", "1 2 1")


def test_every_type_gets_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = judge_types(_judge, "causal-lm", ["gpt2", "mpt", "gemma3n"], jobs=2)

    assert {name: verdict.result for name, verdict in verdicts.items()} == {
        "gpt2": "exact",
        "mpt": "WRONG",
        "gemma3n": "does not build",
    }
    assert "KeyError: 'mpt'" in capsys.readouterr().out
    assert summary("causal-lm", verdicts).startswith("causal-lm: 50.0 % of the 2 types that build are right")


def test_the_page_has_a_row_for_each_type() -> None:
    text = page({"causal-lm": {"gpt2": Verdict("exact", "a | b", "1 2 1")}})

    assert "| causal-lm | 100.0 % | 1 | 0 | 0 | 0 | 0 |" in text
    assert "| gpt2 | exact | 1 2 1 | a \\| b |" in text
    assert not any(len(line) > 120 for line in text.splitlines())
