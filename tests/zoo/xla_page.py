"""The section of ``docs/zoo.md`` about the XLA sweep."""

from collections import Counter
from collections.abc import Mapping
from importlib import metadata

import torch
import transformers

from tests.zoo import types
from tests.zoo.page import section_of, table_of
from tests.zoo.sweep import RIGHT, WRONG, Verdict

TITLE = "## Over two XLA ranks"

_INTRODUCTION = """\
Written by `python -m tests.zoo xla --output docs/zoo.md` at commit {commit}, with torch {torch}, torch_xla {torch_xla},
transformers {transformers}, on PJRT's CPU device.

Each type is cut into two stages on two ranks with XLA devices, and trains on one padded batch in four microbatches. The
loss and each gradient are compared with those of the unwrapped model in one process on the CPU, and in one process with
an XLA device. Dropout is off.

| result | meaning |
|---|---|
| exact | equal to the XLA process to the last bit; within rounding of the CPU |
| to rounding | each gradient differs from both by less than 1e-5 of its greatest value; the largest are given |
| refused | an error that the package raises |
| failing, WRONG | another error; a difference above rounding |
| XLA's own | the unwrapped model fails in one XLA process, or differs there from the CPU by more than rounding |
| does not build | the model cannot be built or trained by itself on the CPU |

Rates are those of the types that build and that one XLA process trains. Experts are computed by transformers'
`batched_mm` (`model.set_experts_implementation("batched_mm")`), noted in the row: its shapes do not depend on the data.

A row of "XLA's own" tells how far the ranks are from the XLA process. A process that is "not done" had other programs
beside it.
"""
_COLUMNS = ("exact", "to rounding", "refused", "failing, WRONG", "XLA's own", "does not build")


def with_xla_section(text: str, verdicts: Mapping[str, Mapping[str, Verdict]], commit: str = "unknown") -> str:
    """Return the page ``text`` with the section of these verdicts, by task, in the place of its own, or at its end."""
    words = _INTRODUCTION.format(
        commit=commit,
        torch=torch.__version__.partition("+")[0],
        torch_xla=metadata.version("torch_xla"),
        transformers=transformers.__version__,
    )
    lines = ["", TITLE, "", words, f"| mapping | right | {' | '.join(_COLUMNS)} |"]
    lines.append(f"|---|{'---|' * (len(_COLUMNS) + 1)}")
    lines += [_rates(task, found) for task, found in verdicts.items()]
    for task, found in verdicts.items():
        if left := len(types(task)) - len(found):
            lines += ["", f"{left} types of {task} have not been compared."]
        lines += ["", f"### {task} on XLA", "", *table_of(found)]
    own = section_of(text, TITLE)
    return text[: len(text) - len(own)] + "\n".join(lines) + "\n"


def _rates(task: str, found: Mapping[str, Verdict]) -> str:
    counts = Counter(verdict.result for verdict in found.values())
    apart = [counts["XLA's own"], counts["does not build"]]
    right, of = sum(counts[result] for result in RIGHT), len(found) - sum(apart)
    numbers = [counts["exact"], counts["to rounding"], counts["refused"], sum(counts[each] for each in WRONG), *apart]
    share = f"{100 * right / of:.1f} %" if of else ""
    return f"| {task} | {share} | {' | '.join(map(str, numbers))} |"
