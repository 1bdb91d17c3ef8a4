"""The page ``docs/zoo.md`` from the results of its sweeps: totals, and what is refused."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tools.zoo.libraries import LIBRARIES
from tools.zoo.results import Results
from tools.zoo.sweep import APART, RIGHT, WRONG, Verdict

_INTRODUCTION = """\
# Which models can be cut

`python -m tools.zoo training --write` compares each type of transformers' auto mappings with a head, and models of
other libraries. `tools/zoo/results/training.tsv` has a row for each.
{source}

Models are as small as possible, and dropout is off. Stages run in one process. Loss, gradients and buffers are compared
with the unwrapped model that accumulates the same microbatches. Types of the first four mappings are cut into two and
four stages, on the meta device and on the CPU; they run in train and eval mode on three shapes, one of them padded. The
others are cut into three stages, and run in train mode on two shapes. A class that several mappings name is in the
first of them. Most vision-language models get an image in each row. Models that return no loss stand in a module with
a loss. Models of libraries get their layer class as an argument.

| result | meaning |
|---|---|
| exact | equal to the last bit, except for the gradient of a tied weight, whose sum has a different order |
| to rounding | each gradient differs by less than 1e-5 of its greatest value |
| refused | an error that the package raises |
| failing | a different error, or a difference above rounding |
| not built | the model cannot be built or trained by itself with the inputs of the sweep |

The rate is that of the types that build. A right type may need an argument of `NxDPPModel`, a different configuration,
or the shapes of the first step: its row has it.

"""

_XLA = """
## Over two XLA ranks

`python -m tools.zoo xla --write` trained each causal-LM type on two ranks with XLA devices, PJRT's CPU device, over one
padded batch in four microbatches. `tools/zoo/results/xla.tsv` has a row for each.
{source}

The loss and each gradient are compared with one process on the CPU, and with one process with an XLA device. *XLA's
own*: the unwrapped model fails in one XLA process, or differs there from the CPU by more than rounding. Experts run by
transformers' `batched_mm`, of fixed shapes.

"""
_GENERATION = """\
`python -m tools.zoo generation` ({source}) compares tokens and logits of `generate`, greedy, sampled and by beams, on
two and four stages. The four mappings name the types that generate from text, images or sounds; {tokens} that also take
images or sounds got tokens only. *Not built*: too large, without a library or inputs, or does not generate.
"""
_LONGEST = 120


def page(sweeps: Mapping[str, Results]) -> str:
    """Return the page in Markdown, of the results of each sweep."""
    training, xla = sweeps["training"], sweeps["xla"]
    found = training.verdicts
    groups = {
        "all mappings": [one for task, types in found.items() if task not in LIBRARIES for one in types.values()],
        "all libraries": [one for task, types in found.items() if task in LIBRARIES for one in types.values()],
    }
    rows = {name: list(types.values()) for name, types in found.items()}
    whole = {name: verdicts for name, verdicts in rows.items() if _is_whole(verdicts)}
    others = {name: verdicts for name, verdicts in rows.items() if name not in whole}
    lines = _rates("mapping or library", "not built", groups | others)
    lines += [
        "",
        *_names("All types that build are right", [f"{name} {_right(of)}" for name, of in whole.items()]),
    ]
    lines += _in_one_line("Both models compiled by `aot_eager` (`python -m tools.zoo compiled`", sweeps["compiled"])
    lines += _in_one_line("Two sharded replicas of two stages (`python -m tools.zoo shards`", sweeps["shards"])
    mixed = sweeps["mixed-rows"]
    lines += _in_one_line("Images in all but the first rows (`python -m tools.zoo mixed-rows`", mixed)
    lines += _refused_names(mixed)
    experts = sweeps["experts"]
    lines += _in_one_line(
        "Experts over 2 and 4 ranks, and over 2 of two stages (`python -m tools.zoo experts`", experts
    )
    lines += _refused_names(experts)
    lines += _classes(sweeps["layer-classes"])
    lines += ["", "## Refused or failing", "", *_refused(found), *_generated(sweeps["generation"])]
    text = _INTRODUCTION.format(source=_source(training)) + "\n".join(lines) + "\n"
    if xla.verdicts:
        text += _XLA.format(source=_source(xla))
        lines = _rates(
            "mapping", "XLA's own, not built", {task: list(types.values()) for task, types in xla.verdicts.items()}
        )
        text += "\n".join([*lines, "", *_refused(xla.verdicts)]) + "\n"
    return text


def _generated(generation: Results) -> list[str]:
    """A section with the rates of ``generate``, and the types that are not right, by their reason."""
    if not generation.verdicts:
        return []
    rows = {task: list(types.values()) for task, types in generation.verdicts.items()}
    every = [verdict for verdicts in rows.values() for verdict in verdicts]
    tokens = sum("tokens only" in verdict.words for verdict in every if verdict.result in RIGHT)
    every_type = [(name, one.result) for types in generation.verdicts.values() for name, one in types.items()]
    return [
        *("", "## Generated tokens", ""),
        *_filled(_GENERATION.format(source=generation.source.partition(",")[0], tokens=tokens)),
        "",
        *_rates("mapping", "not built", {"all four": every, **rows}),
        "",
        *_names("Refused", [name for name, result in every_type if result == "refused"]),
        *_names("Failing", [name for name, result in every_type if result in WRONG]),
    ]


def _in_one_line(words: str, results: Results) -> list[str]:
    """A paragraph with the share of right types in each task, if there are results."""
    rates = []
    for task, types in results.verdicts.items():
        counted = sum(verdict.result not in APART for verdict in types.values())
        rates.append(f"{task} {100 * _right(types.values()) / counted:.1f} % of {counted}")
    told = f"{words}, {results.source.partition(',')[0]}), right: {', '.join(rates)}."
    return ["", *_filled(told)] if rates else []


def _refused_names(results: Results) -> list[str]:
    every = [name for types in results.verdicts.values() for name in types if _is_refused(types[name])]
    return _names("Refused", list(dict.fromkeys(every)))


def _classes(results: Results) -> list[str]:
    """A paragraph with the numbers of classes that are right, refused and wrong as layer classes, if there are any."""
    every = [verdict for types in results.verdicts.values() for verdict in types.values()]
    counts: Counter[str] = Counter()
    for verdict in every:
        for part in verdict.words.partition(";")[0].split(", "):
            number, _, result = part.partition(" ")
            counts[result] += int(number)
    numbers = ", ".join(f"{number} {result}" for result, number in counts.items())
    told = (
        f"Each class of modules of {len(every)} types as the layer class, over two ranks (`python -m tools.zoo "
        f"layer-classes`, {results.source.partition(',')[0]}): {numbers}. "
        f"The file of its rows, `tools/zoo/results/layer-classes.tsv`, names those that are refused."
    )
    return ["", *_filled(told)] if every else []


def _is_refused(verdict: Verdict) -> bool:
    return verdict.result == "refused" or verdict.result in WRONG


def _source(results: Results) -> str:
    return textwrap.fill(f"Results of {results.source}.", 120, break_on_hyphens=False)


def _right(verdicts: Iterable[Verdict]) -> int:
    return sum(verdict.result in RIGHT for verdict in verdicts)


def _is_whole(verdicts: Sequence[Verdict]) -> bool:
    return 0 < _right(verdicts) == sum(verdict.result not in (*APART, "not compared") for verdict in verdicts)


def _filled(text: str) -> list[str]:
    return textwrap.wrap(text, 120, break_on_hyphens=False)


def _names(head: str, words: Sequence[str]) -> list[str]:
    return _filled(f"{head}: {', '.join(words)}.") if words else []


def _rates(head: str, apart: str, rows: Mapping[str, Sequence[Verdict]]) -> list[str]:
    """Return a table with a row for each name that has verdicts; the last column has the types that do not count."""
    lines = [f"| {head} | right | exact | to rounding | refused | failing | {apart} |", "|---|---|---|---|---|---|---|"]
    for name, verdicts in rows.items():
        counts = Counter(verdict.result for verdict in verdicts)
        left = sum(counts[result] for result in APART)
        counted = sum(counts.values()) - left - counts["not compared"]
        share = f"{100 * _right(verdicts) / counted:.1f} %" if counted else ""
        numbers = [*(counts[result] for result in ("exact", "to rounding", "refused")), sum(counts[r] for r in WRONG)]
        if verdicts:
            lines.append(f"| {name} | {share} | {' | '.join(map(str, [*numbers, left]))} |")
    return lines


def _refused(found: Mapping[str, Mapping[str, Verdict]]) -> list[str]:
    """Return a table of the types that are not right, with the reason; one row for a type with one reason."""
    tasks: dict[tuple[str, str], list[str]] = {}
    for task, types in found.items():
        for name, verdict in types.items():
            if _is_refused(verdict):
                tasks.setdefault((name, verdict.words), []).append(task)
    lines = ["| type | of | reason |", "|---|---|---|"]
    return lines + [f"| {name} | {_listed(of)} | {_one_line(words)} |" for (name, words), of in tasks.items()]


def _listed(tasks: Iterable[str]) -> str:
    first, *others = tasks
    return f"{first} and {len(others)} more" if others else first


def _one_line(words: str) -> str:
    words = words.partition(" at ")[0] if len(words) > _LONGEST else words
    short = words if len(words) <= _LONGEST else words[:_LONGEST].rpartition(" ")[0] + " ..."
    return short.replace("|", "\\|")
