"""A graph as text that is the same on every rank that built the same graph, and a short hash of it.

Nothing in it depends on addresses, on Python's randomised ``hash`` or on which device a rank has: a function stands
there by its module and name, a constant by its value where that prints alike everywhere and by its type where not.
"""

import hashlib
import types
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from transformers import PreTrainedConfig

from nxdpp.tracing.calls import OpaqueCall
from nxdpp.tracing.trace import TracedGraph

_DIGEST_BYTES = 8
# Where a configuration came from may differ between machines.
_ORIGINS = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})
# Closures hold functions that hold closures; masks are some three deep.
_DEPTH = 8


class Fingerprint(NamedTuple):
    """What a rank runs: ``digest``, 8 bytes, and the text it is of, compressed."""

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
    """8 bytes that differ where ``content`` does (BLAKE2b)."""
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def parameter_lines(parameters: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """A line for each named parameter or buffer: shape, dtype, whether it is trained."""
    return [
        f"{'parameter' if isinstance(tensor, nn.Parameter) else 'buffer'} {name}: {list(tensor.shape)} {tensor.dtype}"
        f"{'' if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else ' frozen'}"
        for name, tensor in parameters
    ]


def graph_lines(traced: TracedGraph, placed: Mapping[fx.Node, int], root: nn.Module) -> list[str]:
    """A line for each node of a graph: its stage, name, what it calls and with what."""
    return [f"{_stage(node, placed)}{node.name} = {_call(node, root)}" for node in traced.graph.nodes]


def canonical(value: Any, depth: int = _DEPTH) -> str:
    """``value`` as a text that is the same on all ranks."""
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
    except ValueError:  # not yet assigned
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
    return f"{node.op} {target}({', '.join([*map(canonical, node.args), *named])})"


def differing_lines(theirs: Sequence[str], ours: Sequence[str], most: int) -> list[tuple[str | None, str | None]]:
    """The first lines, at most ``most`` pairs, that one text has and the other has not; ``None`` stands for no line.

    Texts of the same lines in another order are compared place by place.
    """
    pairs = list(zip_longest(_only_in(theirs, ours), _only_in(ours, theirs)))
    return (pairs or [pair for pair in zip_longest(theirs, ours) if pair[0] != pair[1]])[:most]


def _only_in(lines: Sequence[str], others: Sequence[str]) -> list[str]:
    known = set(others)
    return [line for line in lines if line not in known]
