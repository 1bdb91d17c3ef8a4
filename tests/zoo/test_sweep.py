"""Verdicts of a sweep: one line for each type, a summary, the rows in a file, and the page."""

import os
import signal
import time
from pathlib import Path

import pytest

from tools.zoo import results
from tools.zoo.__main__ import _WRITTEN
from tools.zoo.page import page
from tools.zoo.results import FOLDER, Results
from tools.zoo.sweep import APART, RIGHT, Journal, Verdict, judge_types, summary

ROOT = Path(__file__).parents[2]


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


def test_the_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    long = "1 stages: TracingError: GPT2 could not be traced with the inputs ['x']: no\n  at models/gpt2.py:3\n more"
    found = {"gpt2": Verdict("refused", long), "mpt": Verdict("exact", "a | b", "1 2 1"), "opt": Verdict("exact")}

    results.write(tmp_path / "rows.tsv", Results().merged("commit 1", {"causal-lm": found}, whole=True))
    read = results.read(tmp_path / "rows.tsv")

    assert read.source == "commit 1"
    assert read.verdicts == {"causal-lm": found | {"gpt2": Verdict("refused", "no at models/gpt2.py:3")}}
    one = {"causal-lm": {"opt": Verdict("failing")}}
    assert read.merged("commit 2", one, whole=False).verdicts["causal-lm"]["mpt"] == found["mpt"]
    assert read.merged("commit 2", one, whole=True).verdicts == one


def test_the_page_has_totals_and_the_refused_types() -> None:
    refused = Verdict("refused", "a | b")
    xla = {"gpt2": Verdict("exact"), "mpt": Verdict("XLA's own", "x"), "opt": Verdict("WRONG", "y")}
    tasks = {"causal-lm": {"gpt2": Verdict("exact"), "reformer": refused}, "masked-lm": {"reformer": refused}}
    tasks["rnnt"] = {"parakeet": Verdict("to rounding")}

    over_xla = Results("commit 2", {"causal-lm": xla | {"xlm": Verdict("not compared")}})
    mixed = {"blip": refused, "llava": Verdict("exact")}
    classes = {"gpt2": Verdict("refused", "3 exact, 2 refused; A: no", "A, B"), "opt": Verdict("exact", "4 exact")}
    sweeps = {"training": Results("commit 1", tasks), "xla": over_xla, "generation": Results()}
    sweeps |= {
        "compiled": Results("commit 3, torch", {"causal-lm": xla}),
        "shards": Results("commit 4", {"causal-lm": xla}),
    }
    sweeps |= {"mixed-rows": Results("commit 5", {"image-text-to-text": mixed})}
    text = page(sweeps | {"layer-classes": Results("commit 6", {"causal-lm": classes})})

    assert "| causal-lm | 50.0 % | 1 | 0 | 1 | 0 | 0 |" in text
    assert "| all mappings | 50.0 % | 1 | 1 | 2 | 0 | 0 |" in text
    assert "All types that build are right: rnnt 1." in text
    assert "| reformer | causal-lm and 1 more | a \\| b |" in text
    assert "| causal-lm | 50.0 % | 1 | 0 | 0 | 1 | 1 |" in text
    assert "| opt | causal-lm | y |" in text
    assert "(`python -m tools.zoo compiled`, commit 3), right: causal-lm 50.0 % of 2." in " ".join(text.split())
    assert "(`python -m tools.zoo shards`, commit 4), right: causal-lm 50.0 % of 2." in " ".join(text.split())
    assert "commit 5), right: image-text-to-text 50.0 % of 2. Refused: blip." in " ".join(text.split())
    assert "of 2 types as the layer class, over two ranks" in " ".join(text.split())
    assert "commit 6): 7 exact, 2 refused. The file" in " ".join(text.split())
    assert "mpt" not in text


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
