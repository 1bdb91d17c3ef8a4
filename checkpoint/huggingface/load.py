"""Loading pretrained weights: every rank reads what it holds."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from nxdpp.checkpoint.files.safetensors_reader import StoredTensor
from nxdpp.checkpoint.huggingface.conversion import Conversion, loading_plan
from nxdpp.checkpoint.huggingface.mismatch import check_fits, fit
from nxdpp.checkpoint.huggingface.model_tensors import check_wrapped, tensors_of
from nxdpp.checkpoint.huggingface.read_directory import stored_tensors
from nxdpp.initialization.allocation import with_type_of
from nxdpp.pipeline.model import NxDPPModel


def load_pretrained(model: NxDPPModel, directory: str | os.PathLike[str]) -> None:
    """Load this rank's part of the Hugging Face ``directory`` into a wrapped ``model``; not collective.

    Reads ``model.safetensors``, or the shards that ``model.safetensors.index.json`` names: the headers of all, and
    the values of the parameters and persistent buffers that this rank holds. Values are those that transformers'
    ``from_pretrained`` would give the unwrapped model, with its renamings, conversions and ties, in the dtypes of
    ``model``; a module that is not transformers' takes the tensors of its own names. Real parameters keep their
    memory, so that optimizers stay right. Those on the meta device are replaced by real ones with the same class,
    attributes and ties, and what no file has, buffers that are not saved, is made by ``model.materialise()``.

    What stands in ``model`` under other names than in the unwrapped model, because modules were replaced, is not in a
    checkpoint: load before that.

    Needs no memory beside the model's, but for 32 MiB, and for a tensor that transformers makes of others, such as
    merged experts: up to twice its bytes while it is made. Where a checkpoint has a tied weight under several names,
    every rank reads all of them, to compare. Files are mapped: one that is cut short while it is read can end the
    process (SIGBUS).

    Raises ``ValueError``, the same on every rank and before anything is changed, for a directory that is no
    checkpoint, a file that is truncated or corrupt, and tensors that are missing, unexpected or of another shape,
    all of the model in one list; ``OSError`` for a file that cannot be read, or is changed meanwhile;
    ``RuntimeError`` for an optimizer that holds parameters on the meta device.
    """
    check_wrapped(model, "load_pretrained")
    directory = Path(directory)
    module = model.original_module
    expected = tensors_of(module)
    stored = stored_tensors(directory)
    plan = loading_plan(module, expected, stored)
    found = fit(module, expected, model.tied_names, stored, plan)
    check_fits(found, module, directory)
    source = _Source(model, stored, found.provided)
    for names in model.tied_names:
        source.check_copies_are_equal([name for name in names if name in found.provided], expected)

    replaced: list[tuple[torch.Tensor, torch.Tensor]] = []
    for conversion, wanted in source.local_conversions():
        filled = [(name, _with_memory(tensor)) for name, tensor in wanted]
        source.fill(conversion, filled)
        pairs = zip(wanted, filled, strict=True)
        replaced += [(tensor, real) for (_, tensor), (_, real) in pairs if real is not tensor]
    model.replace_local_tensors(replaced)
    model.materialise()
    if isinstance(module, PreTrainedModel):
        # What save_pretrained is to revert: from_pretrained notes it in this place.
        module.__dict__["_weight_conversions"] = plan.used


class _Source:
    """The tensors of a checkpoint as those of a model: ``provided`` gives how each is made."""

    def __init__(
        self, model: NxDPPModel, stored: Mapping[str, StoredTensor], provided: Mapping[str, Conversion]
    ) -> None:
        self._model = model
        self._stored = stored
        self._provided = provided

    def local_conversions(self) -> list[tuple[Conversion, list[tuple[str, torch.Tensor]]]]:
        """What this rank needs, in the order of the files, each with the local tensors to fill from what it makes."""
        names = {name: names for names in self._model.tied_names for name in names}
        wanted: dict[int, list[tuple[str, torch.Tensor]]] = {}
        conversions: dict[int, Conversion] = {}
        seen: set[torch.Tensor] = set()
        for name, tensor in tensors_of(self._model.local_module).items():
            source = next((mate for mate in names.get(name, [name]) if mate in self._provided), None)
            if source is not None and tensor not in seen:
                seen.add(tensor)
                conversion = self._provided[source]
                conversions[id(conversion)] = conversion
                wanted.setdefault(id(conversion), []).append((source, tensor))
        in_order = sorted(conversions.values(), key=lambda conversion: self._place(conversion.names[0]))
        return [(conversion, wanted[id(conversion)]) for conversion in in_order]

    def fill(self, conversion: Conversion, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Give ``tensors``, each named after what ``conversion`` makes, their values."""
        if conversion.converter is None:
            for _, tensor in tensors:
                self._stored[conversion.names[0]].read_into(tensor)
            return
        made = self._converted(conversion, tensors[0][1].dtype)
        for name, tensor in tensors:
            tensor.detach().copy_(made[name])

    def check_copies_are_equal(self, names: list[str], expected: Mapping[str, torch.Tensor]) -> None:
        """Raise ``ValueError`` unless the tensors ``names``, which are one in the model, have the same values."""
        for name in names[1:]:
            if not self._are_equal(names[0], name, expected[name].dtype):
                raise ValueError(
                    f"{names[0]} and {name} are one tied weight in this {type(self._model.original_module).__name__}, "
                    f"but two different ones in {self._stored_path(names[0])}. Nothing was loaded. Wrap a model whose "
                    f"configuration does not tie them (tie_word_embeddings=False)."
                )

    def _are_equal(self, first: str, second: str, dtype: torch.dtype) -> bool:
        conversions = [self._provided[first], self._provided[second]]
        if all(conversion.converter is None for conversion in conversions):
            one, two = (self._stored[conversion.names[0]] for conversion in conversions)
            return all(map(torch.equal, one.pieces(dtype), two.pieces(dtype)))
        one_whole, two_whole = (self._converted(self._provided[name], dtype)[name] for name in (first, second))
        return torch.equal(one_whole, two_whole)

    def _converted(self, conversion: Conversion, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        # In the dtype of the model from the start, as from_pretrained does.
        return conversion.convert(lambda name: self._stored[name].read(dtype), self._model.original_module)

    def _place(self, name: str) -> tuple[Path, int]:
        return self._stored[name].path, self._stored[name].place

    def _stored_path(self, name: str) -> Path:
        return self._stored[self._provided[name].names[0]].path


def _with_memory(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself, or, where it is on the meta device, another like it with memory."""
    if not tensor.is_meta:
        return tensor
    with torch.inference_mode(False):
        return with_type_of(torch.empty_like(tensor, device="cpu", requires_grad=False), tensor)
