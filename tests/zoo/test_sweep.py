"""Verdicts of a sweep: one line for each type, a summary, the rows in a file, and the page."""

import os
import signal
import time
from pathlib import Path

from tools.zoo import results
from tools.zoo.__main__ import _WRITTEN
from tools.zoo.page import page
from tools.zoo.results import FOLDER
from tools.zoo.sweep import APART, RIGHT, Journal, Verdict, judge_types

ROOT = Path(__file__).parents[2]


def _judge(task: str, model_type: str) -> Verdict:
    if model_type == "mpt":
        raise KeyError(model_type)
    return Verdict("exact", "a | b", "1 2 1")


def _ends(task: str, model_type: str) -> Verdict:
    if model_type == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if model_type == "slow":
        time.sleep(60)
    return Verdict("exact")


def test_a_sweep_continues_after_a_type_that_is_killed_or_slow() -> None:
    verdicts = judge_types(_ends, "causal-lm", ["killed", "slow", "gpt2"], jobs=1, time_limit=1.0)

    assert verdicts == {
        "killed": Verdict("failing", "the process ended without a result"),
        "slow": Verdict("failing", "not done after 1 s"),
        "gpt2": Verdict("exact"),
    }


def test_the_page_is_that_of_the_rows_and_short() -> None:
    shown = (ROOT / "docs/zoo.md").read_text()
    assert shown == page({name: results.read(FOLDER / f"{name}.tsv") for name in _WRITTEN})
    assert len(shown.encode()) <= 8 * 1024
    rates = "1,168 of 1,183"
    assert rates in (ROOT / "README.md").read_text()
    right, counted = (int(number.replace(",", "")) for number in rates.split(" of "))
    verdicts = [one for found in results.read(FOLDER / "training.tsv").verdicts.values() for one in found.values()]
    assert sum(one.result in RIGHT for one in verdicts) == right
    assert sum(one.result not in APART for one in verdicts) == counted


def test_a_journal_goes_on_after_its_types(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    judge_types(_judge, "causal-lm", ["gpt2"], 1, journal)

    verdicts = judge_types(_fails, "causal-lm", ["gpt2"], 1, journal)

    assert verdicts == {"gpt2": Verdict("exact", "a | b", "1 2 1")}
    assert journal.verdicts("masked-lm") == {}


def _fails(task: str, model_type: str) -> Verdict:
    raise AssertionError(model_type)
