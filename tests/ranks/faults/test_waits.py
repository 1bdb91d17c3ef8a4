"""Each call that waits for another rank says so on the board."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import nxdpp
from tests.ranks.faults import waiting_program
from tests.support.run_program import run_program

_ROOT = Path(nxdpp.__file__).resolve().parents[1]
# Functions of torch that wait for other ranks, by the name that follows the last dot.
_WAITS = {
    "all_gather",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "new_group",
    "wait",
    "wait_tensor",
    "_all_gather",
    "_reduce_scatter",
}
_EXCHANGING = ("extremes", "gather_values", "broadcast_value")
# What waits for no other rank, or is called by what says so.
_OTHER = {
    "nxdpp/checkpoint/distributed/save.py": "a thread of this process",
    "nxdpp/checkpoint/distributed/reads.py": "a thread of this process",
    "nxdpp/checkpoint/files/checksummed_reader.py": "a thread of this process",
    "nxdpp/devices/host_sends.py": "its callers wait",
    "nxdpp/doors/nxd/checkpoint.py": "a thread of this process",
    "nxdpp/pipeline/runtime/overlapped_pair.py": "a thread of this process",
    "nxdpp/planning/measured/rank.py": "torchrun of the planner ends the ranks after a limit",
    "nxdpp/ranks/faults/causes.py": "threads of the failure watch",
    "nxdpp/ranks/faults/hang_watch.py": "threads of the failure watch",
    "nxdpp/ranks/faults/rank_watch.py": "threads of the failure watch",
    "nxdpp/ranks/start_store.py": "before the failure watch starts",
}
"""By file, the reason."""


class _Finder(ast.NodeVisitor):
    """Lines of calls that wait outside of a ``Wait``."""

    def __init__(self) -> None:
        self.found: list[int] = []
        self._within = 0
        self._shown = False

    def visit_With(self, node: ast.With) -> None:
        shows = any("wait" in ast.unparse(item.context_expr).split("(")[0].lower() for item in node.items)
        self._within += shows
        self.generic_visit(node)
        self._within -= shows

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        within, shown = self._within, self._shown
        assigned = [target for each in ast.walk(node) if isinstance(each, ast.Assign) for target in each.targets]
        self._within, self._shown = 0, "board.wait" in map(ast.unparse, assigned)
        self.generic_visit(node)
        self._within, self._shown = within, shown

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func).rsplit(".", 1)[-1]
        is_begun = any(keyword.arg == "async_op" for keyword in node.keywords)
        is_ours = isinstance(node.func, ast.Name) and not name.startswith("_")
        if name in _WAITS and not (is_begun or is_ours or self._within or self._shown):
            self.found.append(node.lineno)
        self.generic_visit(node)


def test_each_call_that_waits_for_another_rank_is_within_a_wait() -> None:
    found = {}
    for name, tree in _sources():
        finder = _Finder()
        finder.visit(tree)
        if finder.found:
            found[name] = finder.found
    assert {name: lines for name, lines in found.items() if name not in _OTHER} == {}
    assert set(_OTHER) - set(found) == set(), "these have none any more"


def test_the_table_has_each_exchange() -> None:
    """Those of doors, NCCL, the start, shards and generate are made alike, and met in the tests of their modules."""
    others = {"comparison of kept gradients", "first message", "new process groups"}
    others |= {"next token of generate", "next token of the other replicas"}
    others |= {"gather of parameters", "reduction of gradients", "rows of a sharded parameter"}
    calls = [
        call
        for name, tree in _sources()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and "/doors/" not in name
    ]
    names = [call.args[0] for call in calls if ast.unparse(call.func) == "Wait"]
    exchanging = [call for call in calls if ast.unparse(call.func) in _EXCHANGING]
    names += [keyword.value for call in exchanging for keyword in call.keywords if keyword.arg == "name"]
    made = {name.value for name in names if isinstance(name, ast.Constant)}
    met = set().union(*_EXCHANGES.values())
    assert made - met == others


@cache
def _sources() -> list[tuple[str, ast.Module]]:
    """Modules that wait, by name and text, or name an exchange."""
    words = re.compile(rf"\b({'|'.join([*_WAITS, 'Wait', *_EXCHANGING])})\(")
    texts = {path: path.read_text() for path in sorted((_ROOT / "nxdpp").rglob("*.py"))}
    return [(str(path.relative_to(_ROOT)), ast.parse(text)) for path, text in texts.items() if words.search(text)]


_STEP = {
    "comparison of the pipeline's steps",
    "exchange of values",
    "gradients of tied weights",
    "mean loss",
}
_FILES = {"exchange of all ranks"}
_PIPELINE = {
    "clocks",
    "P2P transfer",
    "descriptions of tensors",
    "outputs of the pipeline",
    "tensors of the model for rank 0",
}
_ONE_REPLICA = {"overflows of the scaled gradients", "norm of the gradients"}
_TENSOR = {"collective of a tensor-parallel layer", "comparison of numbers"}
_EXPERTS = {
    "tokens of experts",
    "comparison of experts",
    "training step of experts over ranks",
    "evaluation of experts over ranks",
}
_CONTEXT = {
    "exchange of heads and tokens",
    "loss of context ranks",
    "batches of context ranks",
    "training step over context ranks",
    "evaluation over context ranks",
}
_REPLICAS = {
    "comparison of optimizers",
    "comparison of random numbers",
    "average of gradients during a step",
    "average of the gradients",
    "comparison of numbers",
    "comparison of batches",
    "comparison of parameters",
    "gradients that replicas have",
    "mean loss of a training step",
    "mean loss of an evaluation",
    "new parameters",
    "norm of the gradients",
    "parts of a file",
}
_EXCHANGES = {
    (2, 1, 2, 1, 1): _TENSOR | {"comparison of the tensor-parallel ranks' steps"},
    (4, 2, 1, 1, 1): (_STEP | _FILES | _REPLICAS | _PIPELINE) - {"tensors of the model for rank 0"},
    (2, 2, 1, 1, 1): _ONE_REPLICA | {"tensors of the model for rank 0"},
    (2, 1, 1, 2, 1): _EXPERTS,
    (2, 1, 1, 1, 2): _CONTEXT,
    (8, 2, 2, 1, 1): (_STEP | _FILES | _REPLICAS | _PIPELINE | _TENSOR | {"new process group"})
    - {"tensors of the model for rank 0"},
}
"""By ranks, pipeline, tensor, expert- and context-parallel size: exchanges before which the last rank sleeps."""


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=pytest.mark.sweep if each[0] == 8 else ()) for each in _EXCHANGES],
    ids=lambda layout: "{}ranks_pp{}_tp{}_ep{}_cp{}".format(*layout),
)
def test_rank_that_sleeps_before_an_exchange_is_named(layout: tuple[int, int, int, int, int], tmp_path: Path) -> None:
    ranks, *sizes = layout
    arguments = [*map(str, sizes), str(tmp_path), *sorted(_EXCHANGES[layout])]
    ended = run_program(str(waiting_program.__file__), arguments, ranks, timeout=300.0)
    assert ended.codes == [0] * ranks, ended.output
    _, *sleeps = re.split("^sleeps: ", ended.output, flags=re.M)
    for sleep in sleeps:
        asleep = sleep.split("\nwakes")[0]
        named = re.findall(r"^verdict: rank (\d+) (?:hangs|is in|is outside)", asleep, re.M)
        assert set(named) == {str(ranks - 1)}, sleep
    assert {sleep.splitlines()[0] for sleep in sleeps} == _EXCHANGES[layout]
