"""The page ``docs/zoo.md`` from the verdicts of the training sweep."""

import re
import textwrap
from collections import Counter
from collections.abc import Collection, Mapping
from importlib import metadata
from pathlib import Path

import torch
import transformers

from tests.zoo.libraries import DISTRIBUTIONS, LIBRARIES
from tests.zoo.sweep import RIGHT, WRONG, Verdict

INTRODUCTION = """\
# Which models can be cut

Written by `python -m tests.zoo training --output docs/zoo.md` at commit {commit}, with torch {torch},
{versions}.

Each type of transformers' auto mappings with a head, and models of other libraries, are built as small as possible.
Stages run in one process. Loss, gradients and buffers are compared with the unwrapped model that accumulates the same
microbatches. Dropout is off. Types of the first four mappings are cut into two and four stages, on the meta device and
on the CPU; they run in train and eval mode on three shapes, one of them padded. The others are cut into three stages,
and run in train mode on two shapes. A class that several mappings name is in the first of them. Vision-language models
get an image in each row, except for those named in `tests/zoo/inputs/image_text.py`.

| result | meaning |
|---|---|
| exact | equal to the last bit, except for the gradient of a tied weight, a sum in another order |
| to rounding | each gradient differs by less than 1e-5 of its greatest value; the number is the largest difference |
| refused | an error that the package raises; its first line and the place in the model are given |
| failing, WRONG | another error; a difference above rounding |
| does not build | the model cannot be built or trained by itself with the inputs of the sweep |

Rates are those of the types that build; the last column has the number of those that do not. A right type that needs
an argument of `NxDPPModel`, another configuration or the shapes of the first step has a row with it. *Received* has the
number of values that each stage after the first receives. Models that return no loss stand in a module with a loss,
which is a script's own: `tests/zoo/with_loss.py` and `tests/zoo/libraries/case.py`. Models of the libraries get their
layer class, and no other argument.

## `None` between layers

A graph cannot ask `x is None` of a value that exists only at run time. The trace decides it as follows:

- An item of a module's output after the first is `None` in the graph if it is `None` on fake tensors of these sizes
  (`hiera` and `xlnet` need this). So is a whole output whose annotation names `None`. Other inputs get another graph.
- Where that depends on data, the trace guesses it, and the guess is checked at run time (`ibert` needs this).
- Any other such value is checked at run time. If it is `None` there, the step ends with an error that names the file
  and line.
- transformers leaves out a mask that no kernel needs, which depends on the padding. The graph hands such a mask on as
  it is. Items of a mask are checked at run time. `gemma4` and `gemma4_unified` slice masks only for `logits_to_keep`
  above 0.

## Results

"""
_COLUMNS = ("exact", "to rounding", "refused", "failing, WRONG", "does not build")


def page(verdicts: Mapping[str, Mapping[str, Verdict]], commit: str = "unknown") -> str:
    """The page in Markdown: a table of rates, then a section for each task and library."""
    lines = [f"| mapping or library | right | {' | '.join(_COLUMNS)} |", f"|---|{'---|' * (len(_COLUMNS) + 1)}"]
    lines += [_rates(name, found.values()) for name, found in verdicts.items()]
    others = [found for name, found in verdicts.items() if name not in LIBRARIES]
    libraries = [found for name, found in verdicts.items() if name in LIBRARIES]
    for title, group in (("all mappings", others), ("all libraries", libraries)):
        if group:
            lines.append(_rates(title, [verdict for found in group for verdict in found.values()]))
    for name, found in verdicts.items():
        lines += ["", f"### {name}", "", *_section(found)]
    head = INTRODUCTION.format(commit=commit, torch=torch.__version__.partition("+")[0], versions=_versions())
    return head + "\n".join(lines) + "\n"


def section_of(text: str, title: str) -> str:
    """The section of ``text`` with this heading, to the end of ``text``, after an empty line; or an empty string."""
    found = text.find(f"\n{title}\n")
    return text[found:] if found >= 0 else ""


def table_of(found: Mapping[str, Verdict]) -> list[str]:
    """Lines with the names of exact types, and a table with a row for each other type."""
    return _section(found)


def _rates(name: str, verdicts: Collection[Verdict]) -> str:
    counts = Counter(verdict.result for verdict in verdicts)
    built = len(verdicts) - counts["does not build"]
    right = sum(counts[result] for result in RIGHT)
    numbers = [*(counts[result] for result in ("exact", "to rounding", "refused")), sum(counts[r] for r in WRONG)]
    share = f"{100 * right / built:.1f} %" if built else ""
    return f"| {name} | {share} | {' | '.join(map(str, numbers))} | {counts['does not build']} |"


def _section(found: Mapping[str, Verdict]) -> list[str]:
    plain = [name for name, verdict in sorted(found.items()) if verdict.result == "exact" and not verdict.words]
    lines = textwrap.wrap(f"Exact: {', '.join(plain)}.", 120, break_on_hyphens=False) if plain else []
    rows = [(name, verdict) for name, verdict in sorted(found.items()) if name not in plain]
    if rows:
        lines += ["", "| type | result | received | |", "|---|---|---|---|"]
        lines += [f"| {name} | {v.result} | {v.received} | {_one_line(v.words)} |" for name, v in rows]
    return lines


def _versions() -> str:
    installed = ["transformers " + transformers.__version__]
    for distribution in DISTRIBUTIONS.values():
        try:
            installed.append(f"{distribution} {metadata.version(distribution)}")
        except metadata.PackageNotFoundError:
            continue
    return "\n".join(textwrap.wrap(", ".join(installed), 116, break_on_hyphens=False))


def _one_line(words: str) -> str:
    """The first line of a message, with the place in the model."""
    site_packages = str(Path(transformers.__file__).parents[1])
    words = words.replace(site_packages + "/", "").replace("|", "\\|")
    first, _, rest = words.partition("\n")
    first = re.sub(r"^(\d stages: )?TracingError: .* could not be traced with the inputs \[[^\]]*\]: ", "", first)
    place = re.search(r"^\s*at (\S+\.py:\d+)", rest, re.MULTILINE)
    return " ".join(first.split())[:240] + (f" at {place.group(1)}" if place else "")
