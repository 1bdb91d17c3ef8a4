"""Which tensors a checkpoint has and which rank writes them, worked out on every rank alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from nxdpp.checkpoint.conversion import Conversion, saving_conversions
from nxdpp.checkpoint.shard_writer import Layout


@dataclass
class Shard:
    """What one rank writes: the conversions that it runs, and the tensors that they make."""

    conversions: list[Conversion]
    layouts: dict[str, Layout]


def plan_shards(
    module: nn.Module, tied_names: Sequence[Sequence[str]], held: Sequence[Mapping[str, Layout] | None]
) -> dict[int, Shard]:
    """What each rank writes, the first of those that hold it; ranks that write nothing are left out.

    ``held`` gives, for each rank, the tensors that it has, under all their names; ``None`` for one that is not to
    write. Conversions run on the meta device here.

    Raises ``NotImplementedError`` where transformers would make a tensor of others that no rank holds all of.
    """
    layouts: dict[str, Layout] = {}
    for tensors in held:
        layouts = {**(tensors or {}), **layouts}
    mates = {name: names for names in tied_names for name in names}
    shards: dict[int, Shard] = {}
    for conversion in saving_conversions(module, _names_to_save(module, list(layouts), tied_names)):
        rank = _first_holder(conversion, mates, held)
        made = conversion.convert(lambda name: _on_meta(layouts[name]), module)
        shard = shards.setdefault(rank, Shard([], {}))
        shard.conversions.append(conversion)
        shard.layouts |= {name: Layout(tuple(tensor.shape), tensor.dtype) for name, tensor in made.items()}
    return dict(sorted(shards.items()))


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
