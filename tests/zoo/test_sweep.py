"""Verdicts of a sweep: one line for each type, a summary, and the page."""

from pathlib import Path

import pytest

from tests.zoo.page import page, section_of
from tests.zoo.sweep import Journal, Verdict, judge_types, summary
from tests.zoo.xla_page import TITLE, with_xla_section

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


def test_a_journal_goes_on_after_its_types(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    judge_types(_judge, "causal-lm", ["gpt2"], 1, journal)

    verdicts = judge_types(_fails, "causal-lm", ["gpt2"], 1, journal)

    assert verdicts == {"gpt2": Verdict("exact", "a | b", "1 2 1")}
    assert journal.verdicts("masked-lm") == {}


def _fails(task: str, model_type: str) -> Verdict:
    raise AssertionError(model_type)


def test_the_section_about_xla_replaces_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.zoo.xla_page.metadata.version", lambda name: "2.9.0")
    verdicts = {"gpt2": Verdict("exact"), "mpt": Verdict("XLA's own", "x"), "opt": Verdict("WRONG", "y")}
    rest = page({"causal-lm": {"gpt2": Verdict("exact")}})

    text = with_xla_section(with_xla_section(rest, {"causal-lm": {}}), {"causal-lm": verdicts})

    assert text.startswith(rest)
    assert text.count(TITLE) == 1
    assert "| causal-lm | 50.0 % | 1 | 0 | 0 | 1 | 1 | 0 |" in text
    assert "types of causal-lm have not been compared" in text
    assert rest + section_of(text, TITLE) == text
