"""Which tensors a checkpoint has and which rank writes them to which file, worked out on every rank alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from nxdpp.checkpoint.huggingface.conversion import Conversion, saving_conversions

SHARD_BYTES = 10**9
"""In a file at most, but for a tensor that has more, and for those that a conversion makes at once.

What a file gets is in memory at once: a copy, where it is made of other tensors or comes from another device. So this
is what a rank needs beside its model, and smaller than the 50 GB of transformers.
"""


@dataclass(frozen=True)
class Layout:
    """Shape and dtype of a tensor that is to be written."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes that its values take."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass
class Shard:
    """A file that ``rank`` writes: the conversions that it runs, and the tensors that they make."""

    rank: int
    conversions: list[Conversion] = field(default_factory=list)
    layouts: dict[str, Layout] = field(default_factory=dict)
    bytes: int = 0

    def add(self, conversion: Conversion, made: Mapping[str, Layout]) -> None:
        """Have it hold what ``conversion`` makes."""
        self.conversions.append(conversion)
        self.layouts |= made
        self.bytes += _bytes(made)


def plan_shards(
    module: nn.Module, tied_names: Sequence[Sequence[str]], held: Sequence[Mapping[str, Layout] | None]
) -> list[Shard]:
    """What is written, each part by the first of the ranks that hold it, in the order of ranks.

    ``held`` gives, for each rank, the tensors that it has, under all their names; ``None`` for one that is not to
    write. Conversions run on the meta device here.

    Raises ``NotImplementedError`` where transformers would make a tensor of others that no rank holds all of.
    """
    layouts: dict[str, Layout] = {}
    for tensors in held:
        layouts = {**(tensors or {}), **layouts}
    mates = {name: names for names in tied_names for name in names}
    shards: dict[int, list[Shard]] = {}
    for conversion in saving_conversions(module, _names_to_save(module, list(layouts), tied_names)):
        rank = _first_holder(conversion, mates, held)
        made = conversion.convert(lambda name: _on_meta(layouts[name]), module)
        made_layouts = {name: Layout(tuple(tensor.shape), tensor.dtype) for name, tensor in made.items()}
        of_rank = shards.setdefault(rank, [Shard(rank)])
        if of_rank[-1].layouts and of_rank[-1].bytes + _bytes(made_layouts) > SHARD_BYTES:
            of_rank.append(Shard(rank))
        of_rank[-1].add(conversion, made_layouts)
    return [shard for _, of_rank in sorted(shards.items()) for shard in of_rank]


def _names_to_save(module: nn.Module, names: Sequence[str], tied_names: Sequence[Sequence[str]]) -> list[str]:
    """``names`` without those that are not saved, and with one for each tied weight."""
    if not isinstance(module, PreTrainedModel):
        repeated = {name for group in tied_names for name in group[1:]}
        return [name for name in names if name not in repeated]
    ignored = set(module._keys_to_ignore_on_save or ())
    first = {name: group[0] for group in tied_names for name in group}
    # transformers asks which tensors are one in memory: tiny ones stand for the real ones, which are spread over ranks.
    tokens = {name: torch.zeros(1) for name in names}
    state = {name: tokens[first.get(name, name)] for name in names if name not in ignored}
    return list(remove_tied_weights_from_state_dict(state, module))


def _first_holder(
    conversion: Conversion, mates: Mapping[str, Sequence[str]], held: Sequence[Mapping[str, Layout] | None]
) -> int:
    for rank, tensors in enumerate(held):
        if tensors and all(any(mate in tensors for mate in mates.get(name, [name])) for name in conversion.names):
            return rank
    raise NotImplementedError(
        f"transformers saves {conversion.first} as one tensor of {conversion.names}, which are on several ranks here; "
        f"that is not built. Use fewer stages, or cut elsewhere (pipeline_cuts)."
    )


def _on_meta(layout: Layout) -> torch.Tensor:
    return torch.empty(layout.shape, dtype=layout.dtype, device="meta")


def _bytes(layouts: Mapping[str, Layout]) -> int:
    return sum(layout.bytes for layout in layouts.values())
