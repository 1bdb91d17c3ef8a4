"""Fingerprint of a graph: a text that is equal on all ranks with the same graph, and its hash.

The text does not depend on addresses, on Python's randomised ``hash`` or on the number of a rank's device. A function
appears as its module and name, a constant as its value. Its type appears when the value prints differently on ranks.
"""

import hashlib
import types
import zlib
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import fx, nn
from transformers import PreTrainedConfig

from nxdpp.tracing.calls import OpaqueCall
from nxdpp.tracing.modes import modes_of
from nxdpp.tracing.trace import TracedGraph

_DIGEST_BYTES = 8
# Fields of a configuration that may differ between machines.
_ORIGINS = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})
# Limit of nested closures; those of masks are about three deep.
_DEPTH = 8
_LINES_SHOWN = 4
_LINES_COMPARED = 100
# Longest line that a message shows whole.
_LINE = 200


class Fingerprint(NamedTuple):
    """A text, compressed, and ``digest``, its hash of 8 bytes."""

    digest: bytes
    compressed: bytes

    @property
    def lines(self) -> list[str]:
        """The text."""
        return zlib.decompress(self.compressed).decode().splitlines()


def fingerprint(lines: Iterable[str]) -> Fingerprint:
    """The fingerprint of a text."""
    text = "\n".join(lines).encode()
    return Fingerprint(digest(text), zlib.compress(text, 1))


def digest(content: bytes) -> bytes:
    """A hash of ``content``, 8 bytes (BLAKE2b)."""
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def parameter_lines(parameters: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """A line for each named parameter or buffer: shape, dtype, and whether it is frozen."""
    return [
        f"{'parameter' if isinstance(tensor, nn.Parameter) else 'buffer'} {name}: {list(tensor.shape)} {tensor.dtype}"
        f"{'' if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else ' frozen'}"
        for name, tensor in parameters
    ]


def graph_lines(traced: TracedGraph, placed: Mapping[fx.Node, int], root: nn.Module) -> list[str]:
    """A line for each node of a graph: its stage, name, function or module, and arguments."""
    return [f"{_stage(node, placed)}{node.name} = {_call(node, root)}" for node in traced.graph.nodes]


def canonical(value: Any, depth: int = _DEPTH) -> str:
    """The text of ``value``, equal on all ranks."""
    if value is None or value is ... or isinstance(value, bool | int | float | complex | str | torch.dtype):
        return repr(value)
    if isinstance(value, fx.Node):
        return value.name
    if depth == 0:
        return type(value).__qualname__
    if isinstance(value, tuple | list):
        return f"[{', '.join(canonical(item, depth - 1) for item in value)}]"
    if isinstance(value, slice):
        return f"slice({', '.join(canonical(part, depth - 1) for part in (value.start, value.stop, value.step))})"
    if isinstance(value, Mapping):
        items = (f"{canonical(key, depth - 1)}: {canonical(item, depth - 1)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(canonical(item, depth - 1) for item in value))}}}"
    if isinstance(value, torch.device):
        return value.type
    return _canonical_object(value, depth)


def _canonical_object(value: Any, depth: int) -> str:
    if isinstance(value, OpaqueCall):
        return f"{canonical(value.function, depth - 1)}{canonical(value.bound(), depth - 1)}"
    if isinstance(value, torch.Tensor):
        return f"tensor {list(value.shape)} {value.dtype}"
    if isinstance(value, PreTrainedConfig):
        fields = {name: item for name, item in sorted(vars(value).items()) if name not in _ORIGINS}
        return f"{type(value).__qualname__}({canonical(fields, depth - 1)})"
    if isinstance(value, partial):
        return f"partial({canonical((value.func, value.args, value.keywords), depth - 1)})"
    if isinstance(value, types.MethodType):
        return f"{type(value.__self__).__qualname__}.{value.__func__.__qualname__}"
    if isinstance(value, types.FunctionType):
        closure = [canonical(_content(cell), depth - 1) for cell in value.__closure__ or ()]
        return f"{_name(value)}<{', '.join(closure)}>"
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        return _name(value)
    return _name(type(value))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', None) or ''}.{value.__qualname__}"


def _stage(node: fx.Node, placed: Mapping[fx.Node, int]) -> str:
    return f"stage {placed[node]}: " if node in placed else "any stage: "


def _call(node: fx.Node, root: nn.Module) -> str:
    target = canonical(node.target) if node.op == "call_function" else str(node.target)
    if node.op == "call_module":
        target += f" ({_name(type(root.get_submodule(str(node.target))))})"
    named = [f"{name}={canonical(value)}" for name, value in node.kwargs.items()]
    return f"{node.op} {target}({', '.join([*map(canonical, node.args), *named])}){_modes(node)}"


def _modes(node: fx.Node) -> str:
    modes = modes_of(node)
    return f" under {canonical(modes.changes)} in block {modes.block}" if modes.changes or modes.block else ""


def differing_lines(theirs: Sequence[str], ours: Sequence[str], most: int) -> list[tuple[str | None, str | None]]:
    """Pairs of lines that only one of two texts has, at most ``most``; ``None`` in a pair means no line.

    Texts of the same lines in another order are compared line by line.
    """
    pairs = list(zip_longest(_only_in(theirs, ours), _only_in(ours, theirs)))
    return (pairs or [pair for pair in zip_longest(theirs, ours) if pair[0] != pair[1]])[:most]


def _only_in(lines: Sequence[str], others: Sequence[str]) -> list[str]:
    known = set(others)
    return [line for line in lines if line not in known]


def show_difference(there: str, theirs: Fingerprint, here: str, ours: Fingerprint) -> str:
    """The first differences of two ranks' texts, for a message; ``there`` and ``here`` name the ranks."""
    pairs = [differing_parts(*pair) for pair in differing_lines(theirs.lines, ours.lines, _LINES_COMPARED)]
    # Several functions may hold one configuration.
    distinct = {(theirs.items, ours.items): (theirs, ours) for theirs, ours in reversed(pairs)}
    shown = list(reversed(distinct.values()))[:_LINES_SHOWN]
    return "".join(f"  {there}: {theirs.text}\n  {here}: {ours.text}\n" for theirs, ours in shown)


class Part(NamedTuple):
    """The start of a line, and the items after it in which it differs from another; all of it where it is short."""

    start: str
    items: str

    @property
    def text(self) -> str:
        """The line for a message."""
        return f"{self.start}{self.items}"


def differing_parts(theirs: str | None, ours: str | None) -> tuple[Part, Part]:
    """The parts that differ between two lines, such as fields of a configuration."""
    if theirs is None or ours is None or max(len(theirs), len(ours)) <= _LINE:
        short = [line if line is None or len(line) <= _LINE else f"{line[:_LINE]}..." for line in (theirs, ours)]
        return Part("", short[0] or "(no such line)"), Part("", short[1] or "(no such line)")
    one, two = theirs.split(", "), ours.split(", ")
    steps = SequenceMatcher(None, one, two, autojunk=False).get_opcodes()
    changed = [step for step in steps if step[0] != "equal"]
    starts = [f"{line.partition('(')[0][:_LINE]}(... " for line in (theirs, ours)]
    items = [
        ", ".join(item for _, a, b, _, _ in changed for item in one[a:b]),
        ", ".join(item for _, _, _, a, b in changed for item in two[a:b]),
    ]
    return _part(starts[0], items[0]), _part(starts[1], items[1])


def _part(start: str, items: str) -> Part:
    return Part(start, items[:_LINE] + ("..." if len(items) > _LINE else "") or "(without)")


def rank_name(group: dist.ProcessGroup, rank: int, kind: str) -> str:
    """A rank of ``group`` for a message: ``pipeline rank 1 (rank 5)``."""
    return f"{kind} {rank} (rank {dist.get_global_rank(group, rank)})"
