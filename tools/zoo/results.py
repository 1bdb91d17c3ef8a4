"""Rows of a sweep in a file beside this module, such as ``results/training.tsv``.

The first line tells the commit and the versions of the libraries. Each other line has a task, a type, the result, the
number of values that each stage after the first receives, and the reason or the arguments that the type needs.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import transformers

from tools.zoo.sweep import Verdict

FOLDER = Path(__file__).parent / "results"
_COLUMNS = "task\ttype\tresult\treceived\twords"


@dataclass
class Results:
    """Verdicts of a sweep, by task and type.

    Attributes:
        source: commit and versions, as a half sentence.
        verdicts: the tasks in the order of the page.
    """

    source: str = "no commit"
    verdicts: dict[str, dict[str, Verdict]] = field(default_factory=dict)

    def merged(self, source: str, verdicts: Mapping[str, Mapping[str, Verdict]], whole: bool) -> "Results":
        """Return these results with ``verdicts`` in the place of their tasks, or of their types without ``whole``."""
        both = dict(self.verdicts)
        for task, found in verdicts.items():
            earlier = {} if whole else both.get(task, {})
            both[task] = earlier | {name: _short(verdict) for name, verdict in found.items()}
        return Results(source, both)


def read(file: Path) -> Results:
    """Return the results in ``file``, or none if it does not exist."""
    if not file.exists():
        return Results()
    first, columns, *rows = file.read_text(encoding="utf-8").splitlines()
    assert columns == _COLUMNS, f"{file}: {columns}"
    results = Results(first.removeprefix("# "))
    for row in rows:
        task, name, *verdict = row.split("\t")
        results.verdicts.setdefault(task, {})[name] = Verdict(*_in_order(verdict))
    return results


def write(file: Path, results: Results) -> None:
    """Write ``results``, the types of each task in order of their names."""
    lines = [f"# {results.source}", _COLUMNS]
    for task, found in results.verdicts.items():
        lines += ["\t".join((task, name, v.result, v.received, v.words)) for name, v in sorted(found.items())]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _in_order(verdict: list[str]) -> tuple[str, str, str]:
    result, received, words = verdict
    return result, words, received


def _short(verdict: Verdict) -> Verdict:
    """Return the verdict with the first line of its message, and the place in the model."""
    site_packages = str(Path(transformers.__file__).parents[1])
    first, _, rest = verdict.words.replace(site_packages + "/", "").partition("\n")
    first = re.sub(r"^(\d stages: )?TracingError: .* could not be traced with the inputs \[[^\]]*\]: ", "", first)
    place = re.search(r"^\s*at (\S+\.py:\d+)", rest, re.MULTILINE)
    words = " ".join(first.split())[:240] + (f" at {place.group(1)}" if place else "")
    return verdict._replace(words=words)
