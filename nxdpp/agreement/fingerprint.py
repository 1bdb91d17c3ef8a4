"""Fingerprint of a graph: a text that is equal on all ranks with the same graph, and its hash.

The text does not depend on addresses, on Python's randomised ``hash`` or on the number of a rank's device. A function
appears as its module and name, a constant as its value. Its type appears when the value prints differently on ranks.
"""

import hashlib
import types
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import fx, nn
from transformers import PreTrainedConfig

from nxdpp.tracing.graph.calls import OpaqueCall
from nxdpp.tracing.graph.modes import modes_of
from nxdpp.tracing.graph.trace import TracedGraph

_DIGEST_BYTES = 8
# Fields of a configuration that may differ between machines.
_ORIGINS = frozenset({"name_or_path", "commit_hash", "transformers_version"})
# Limit of nested closures. Closures of masks are about three deep.
_DEPTH = 8


class Fingerprint(NamedTuple):
    """A text, compressed, and ``digest``, its hash of 8 bytes."""

    digest: bytes
    compressed: bytes

    @property
    def lines(self) -> list[str]:
        """The text."""
        return zlib.decompress(self.compressed).decode().splitlines()


def fingerprint(lines: Iterable[str], reasons: Sequence[str] = ()) -> Fingerprint:
    """The fingerprint of a text. A message about a different text shows ``reasons`` too, which the hash leaves out."""
    text = "\n".join(lines).encode()
    return Fingerprint(digest(text), zlib.compress("\n".join([*reasons, ""]).encode() + text, 1))


def digest(content: bytes | memoryview) -> bytes:
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
    stages = {node: f"stage {placed[node]}" if node in placed else "any stage" for node in traced.graph.nodes}
    return [f"{stage}: {node.name} = {_call(node, root)}" for node, stage in stages.items()]


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
        # A dict that was filled from a set has another order in each process.
        return f"{{{', '.join(sorted(items))}}}"
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
        fields = {name: item for name, item in sorted(vars(value).items()) if name.strip("_") not in _ORIGINS}
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


def _call(node: fx.Node, root: nn.Module) -> str:
    target = canonical(node.target) if node.op == "call_function" else str(node.target)
    if node.op == "call_module":
        target += f" ({_name(type(root.get_submodule(str(node.target))))})"
    named = [f"{name}={canonical(value)}" for name, value in node.kwargs.items()]
    return f"{node.op} {target}({', '.join([*map(canonical, node.args), *named])}){_modes(node)}"


def _modes(node: fx.Node) -> str:
    modes = modes_of(node)
    return f" under {canonical(modes.changes)} in block {modes.block}" if modes.changes or modes.block else ""


def rank_name(group: dist.ProcessGroup, rank: int, kind: str) -> str:
    """A rank of ``group`` for a message: ``pipeline rank 1 (rank 5)``."""
    return f"{kind} {rank} (rank {dist.get_global_rank(group, rank)})"
