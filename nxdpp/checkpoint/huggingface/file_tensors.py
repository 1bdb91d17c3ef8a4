"""Tensors of a checkpoint's files, converted to tensors of a model."""

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import nn

from nxdpp.checkpoint.distributed.rectangles import placement_of
from nxdpp.checkpoint.files.pieces import printable
from nxdpp.checkpoint.files.safetensors_reader import StoredTensor
from nxdpp.checkpoint.huggingface.conversion import Conversion, loading_plan
from nxdpp.checkpoint.huggingface.load_target import Target
from nxdpp.checkpoint.huggingface.mismatch import Accepted, Fit, check_fits, fit
from nxdpp.checkpoint.huggingface.model_tensors import own_blocks
from nxdpp.checkpoint.huggingface.quantised import check_no_parts, check_none_replaces

Wanted = list[tuple[Conversion, list[tuple[str, torch.Tensor]]]]
"""Conversions, each with the names and local tensors that it fills."""


class FileTensors:
    """Tensors of a checkpoint, converted to ``target``, the tensors of a model, by the conversions ``provided``.

    ``tied`` has the names in the files of each weight that has several there. ``conversions`` are the ones that this
    rank needs, in the order of the files. All tensors that ``only_meta`` ones fill are on the meta device. Their values
    are read once, and looked at before they replace anything.
    """

    def __init__(self, target: Target, stored: Mapping[str, StoredTensor], provided: Mapping[str, Conversion]) -> None:
        self.target = target
        self._stored = stored
        self._provided = provided
        tied = [[name for name in names if name in provided] for names in target.tied_names]
        self.tied = [names for names in tied if len(names) > 1]
        self.conversions = self._local_conversions()
        self.only_meta = all(tensor.is_meta for _, wanted in self.conversions for _, tensor in wanted)

    def _local_conversions(self) -> Wanted:
        names = {name: names for names in self.target.tied_names for name in names}
        wanted: dict[Conversion, list[tuple[str, torch.Tensor]]] = {}
        seen: set[torch.Tensor] = set()
        for name, tensor in self.target.local.items():
            source = next((mate for mate in names.get(name, [name]) if mate in self._provided), None)
            if source is not None and tensor not in seen:
                seen.add(tensor)
                wanted.setdefault(self._provided[source], []).append((source, tensor))

        def position(conversion: Conversion) -> tuple[Path, int]:
            stored = self._stored[conversion.names[0]]
            return stored.path, stored.place

        return sorted(wanted.items(), key=lambda item: position(item[0]))

    def sizes(self) -> dict[Conversion, int]:
        """Bytes of the sources of each conversion in the files."""
        return {each: sum(self._stored[name].bytes for name in each.names) for each, _ in self.conversions}

    def described(self) -> str:
        """The conversions with the tensors that they fill, for a comparison with other ranks."""

        def fields(name: str, tensor: torch.Tensor) -> tuple[object, ...]:
            return name, tensor.shape, tensor.stride(), tensor.dtype, placement_of(tensor)

        return repr([(each.names, [fields(*one) for one in wanted]) for each, wanted in self.conversions])

    def local_without_values(self, names: Collection[str]) -> list[torch.Tensor]:
        """This rank's tensors on the meta device that have one of ``names``, and get no values from the files."""
        loaded = {tensor for _, wanted in self.conversions for _, tensor in wanted}
        tensors = (self.target.local[name] for name in names if name in self.target.local)
        return list(dict.fromkeys(tensor for tensor in tensors if tensor.is_meta and tensor not in loaded))

    def fill(self, conversion: Conversion, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Write the results of ``conversion`` to ``tensors`` of the same names."""
        is_plain = conversion.converter is None
        made = {} if is_plain else self._converted(conversion, tensors[0][1].dtype)
        for name, tensor in tensors:
            for block in own_blocks(tensor):
                if is_plain:
                    self._stored[conversion.names[0]].read_into(block.values, block.offsets)
                else:
                    block.values.copy_(made[name][block.region])

    def check_numbers(self, conversions: Wanted) -> None:
        """Raise ``ValueError`` for a value of the sources of ``conversions`` that is not a number."""
        for conversion, wanted in conversions:
            # A rank looks only at its part, if the files hold the tensor itself.
            places = {placement_of(tensor): tensor for _, tensor in wanted}
            is_part = conversion.converter is None and len(places) == 1
            blocks = [(each.offsets, each.values.shape) for place in places for each in place.blocks(places[place])]
            for name in conversion.names:
                if self._stored[name].has_nan(blocks if is_part else [None]):
                    raise ValueError(
                        f"{printable(name)} in {self._stored[name].path} has values that are not a number (NaN). "
                        f"Nothing was loaded. Copy or download the checkpoint again, or take one from before the loss "
                        f"became NaN. load_local_state_dict() takes any values."
                    )

    def check_copies_are_equal(self, names: list[str]) -> None:
        """Raise ``ValueError`` unless the stored tensors ``names``, one weight in the model, have equal values."""
        for name in names[1:]:
            if not self._are_equal(names[0], name, self.target.expected[name].dtype):
                raise ValueError(
                    f"{names[0]} and {name} are one tied weight in this {type(self.target.module).__name__}, "
                    f"but two different tensors in {self._provided_from(names[0]).path}. Nothing was loaded. Wrap a "
                    f"model whose configuration does not tie them (tie_word_embeddings=False)."
                )

    def _are_equal(self, first: str, second: str, dtype: torch.dtype) -> bool:
        conversions = [self._provided[first], self._provided[second]]
        if all(conversion.converter is None for conversion in conversions):
            one, two = self._provided_from(first), self._provided_from(second)
            return all(map(torch.equal, one.pieces(dtype), two.pieces(dtype)))
        one_whole, two_whole = (self._converted(self._provided[name], dtype)[name] for name in (first, second))
        return torch.equal(one_whole, two_whole)

    def _converted(self, conversion: Conversion, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        # Converted in the dtype of the model, as in from_pretrained. Quantised values need their own dtype.
        own = self.target.quantiser is not None

        def read(name: str) -> torch.Tensor:
            return self._stored[name].read(None if own else dtype)

        return conversion.convert(read, self.target.module)

    def _provided_from(self, name: str) -> StoredTensor:
        return self._stored[self._provided[name].names[0]]


def fitting_tensors(
    target: Target, stored: Mapping[str, StoredTensor], accepted: Accepted, directory: Path, kind: type[nn.Module]
) -> tuple[FileTensors, Fit]:
    """Return the tensors of ``target`` in the files of ``directory``, and how they fit a model of class ``kind``.

    Raises ``ValueError`` for differences that are not ``accepted``, and for parts of quantised weights.
    """
    plan = loading_plan(target.module, target.expected, stored, target.quantiser)
    found = fit(target, stored, plan)
    if target.quantiser is None:
        check_no_parts(plan.unexpected.values(), directory)
        check_none_replaces(found.missing, plan.unexpected, stored, directory)
    check_fits(found, accepted, kind.__name__, directory, target.remedy)
    return FileTensors(target, stored, found.provided), found
