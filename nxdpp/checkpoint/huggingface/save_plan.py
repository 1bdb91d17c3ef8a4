"""Plan of a checkpoint: its tensors, their files, and the rank that writes each file; equal on every rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from nxdpp.checkpoint.files.layout import StoredLayout, layouts_of
from nxdpp.checkpoint.huggingface.conversion import Conversion, saving_conversions

# Largest file, unless one conversion makes more. A rank copies the tensors of one file at a time, so this is also the
# memory that it needs next to its model. transformers writes files of 50 GB.
SHARD_BYTES = 10**9


@dataclass
class Shard:
    """A file that ``rank`` writes: the conversions to run and the layouts of the tensors that they make."""

    rank: int
    conversions: list[Conversion] = field(default_factory=list)
    layouts: dict[str, StoredLayout] = field(default_factory=dict)
    bytes: int = 0

    def add(self, conversion: Conversion, made: Mapping[str, StoredLayout]) -> None:
        """Add ``conversion``, which makes the tensors ``made``."""
        self.conversions.append(conversion)
        self.layouts |= made
        self.bytes += _bytes(made)


def plan_shards(
    module: nn.Module,
    tied_names: Sequence[Sequence[str]],
    held: Sequence[Mapping[str, StoredLayout] | None],
    largest: int | None = None,
) -> list[Shard]:
    """Plan the files in the order of ranks; the first holder of a conversion's sources writes its results.

    ``held`` has for each rank its tensors under all their names, or None if the rank writes nothing. Conversions run
    on the meta device here. A file has at most ``largest`` bytes of values, 1 GB by default, or the tensors of one
    conversion.

    Raises ``NotImplementedError`` if no rank holds all sources of a conversion.
    """
    layouts: dict[str, StoredLayout] = {}
    for tensors in held:
        layouts = {**(tensors or {}), **layouts}
    mates = {name: names for names in tied_names for name in names}
    limit = SHARD_BYTES if largest is None else largest
    shards: dict[int, list[Shard]] = {}
    for conversion in saving_conversions(module, _names_to_save(module, list(layouts), tied_names)):
        rank = _first_holder(conversion, mates, held)
        made = layouts_of(conversion.convert(lambda name: layouts[name].on_meta(), module))
        of_rank = shards.setdefault(rank, [Shard(rank)])
        if of_rank[-1].layouts and of_rank[-1].bytes + _bytes(made) > limit:
            of_rank.append(Shard(rank))
        of_rank[-1].add(conversion, made)
    return [shard for _, of_rank in sorted(shards.items()) for shard in of_rank]


def _names_to_save(module: nn.Module, names: Sequence[str], tied_names: Sequence[Sequence[str]]) -> list[str]:
    """``names`` that are saved, with one name for each tied weight."""
    if not isinstance(module, PreTrainedModel):
        repeated = {name for group in tied_names for name in group[1:]}
        return [name for name in names if name not in repeated]
    ignored = set(module._keys_to_ignore_on_save or ())
    first = {name: group[0] for group in tied_names for name in group}
    # transformers compares the memory of tensors. The real ones are on several ranks, so small ones represent them.
    tokens = {name: torch.zeros(1) for name in names}
    state = {name: tokens[first.get(name, name)] for name in names if name not in ignored}
    return list(remove_tied_weights_from_state_dict(state, module))


def _first_holder(
    conversion: Conversion, mates: Mapping[str, Sequence[str]], held: Sequence[Mapping[str, StoredLayout] | None]
) -> int:
    for rank, tensors in enumerate(held):
        if tensors and all(any(mate in tensors for mate in mates.get(name, [name])) for name in conversion.names):
            return rank
    raise NotImplementedError(
        f"transformers saves {conversion.first} as one tensor made of {conversion.names}, which are on several ranks "
        f"here. This is not implemented: use fewer stages, or cut elsewhere (pipeline_cuts)."
    )


def _bytes(layouts: Mapping[str, StoredLayout]) -> int:
    return sum(layout.bytes for layout in layouts.values())
