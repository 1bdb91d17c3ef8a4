"""The page ``docs/zoo.md`` from the verdicts of the training sweep."""

from collections.abc import Mapping
from pathlib import Path

import torch
import transformers

from tests.zoo.sweep import Verdict, summary

INTRODUCTION = """\
# Which transformers can be cut

Written by `python -m tests.zoo training --output docs/zoo.md`, transformers {transformers}, torch {torch}.

Each type of four auto mappings is built as small as possible and cut into two and four stages. It runs in train and
eval mode on three shapes, one of them padded. Loss, gradients and buffers are compared with the unwrapped model.

| result | meaning |
|---|---|
| exact | equal to the last bit, except for the gradient of a tied weight, a sum in another order |
| to rounding | each gradient differs by less than 1e-5 of its greatest value; the number is the largest difference |
| refused | an error names the construct, its file and line |
| does not build | transformers cannot build or train the type by itself |

*Received* has the number of values that each of four stages after the first receives. The last column of a right type
has the arguments of `NxDPPModel` that it needs and its special configuration.

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

Of these types only `hiera` and `xlnet` compare a value that is `None`. This rule replaces one that followed the
bytecode of the comparisons. The rates with that one were 97.3 % (causal-lm), 94.1 % (masked-lm), 100 % and 100 %.

## Results

"""


def page(verdicts: Mapping[str, Mapping[str, Verdict]]) -> str:
    """The page in Markdown, with a table for each task."""
    versions = {"transformers": transformers.__version__, "torch": torch.__version__.partition("+")[0]}
    lines = [f"- {summary(task, dict(found))}" for task, found in verdicts.items()]
    for task, found in verdicts.items():
        lines += ["", f"### {task}", "", "| type | result | received | |", "|---|---|---|---|"]
        for name, verdict in sorted(found.items()):
            lines.append(f"| {name} | {verdict.result} | {verdict.received} | {_one_line(verdict.words)} |")
    return INTRODUCTION.format(**versions) + "\n".join(lines) + "\n"


def _one_line(words: str) -> str:
    site_packages = str(Path(transformers.__file__).parents[1])
    return " ".join(words.replace(site_packages + "/", "").replace("|", "\\|").split())[:1000]
