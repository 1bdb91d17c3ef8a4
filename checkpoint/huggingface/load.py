"""Load of a Hugging Face directory: each rank reads only the tensors that it holds."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from nxdpp.checkpoint.files.printable import printable
from nxdpp.checkpoint.files.safetensors_reader import StoredTensor, has_nan
from nxdpp.checkpoint.huggingface.conversion import Conversion, loading_plan
from nxdpp.checkpoint.huggingface.divided import division_of, own_elements
from nxdpp.checkpoint.huggingface.load_report import LoadReport, print_once
from nxdpp.checkpoint.huggingface.load_target import Target, target_of
from nxdpp.checkpoint.huggingface.mismatch import Accepted, check_fits, fit
from nxdpp.checkpoint.huggingface.model_tensors import PipelinedModel, check_wrapped, tensors_of
from nxdpp.checkpoint.huggingface.quantised import check_no_parts, check_none_replaces, forget_quantisation
from nxdpp.initialization.allocation import with_type_of


def load_pretrained(
    model: PipelinedModel,
    directory: str | os.PathLike[str],
    *,
    strict: bool = True,
    ignore_mismatched_sizes: bool = False,
    convert_dtype: bool = False,
    dequantize: bool = False,
) -> LoadReport:
    """Load this rank's part of the Hugging Face ``directory`` into a wrapped ``model``; not collective.

    Reads the headers of ``model.safetensors``, or of the files in ``model.safetensors.index.json``. Reads the values
    of this rank's parameters and persistent buffers. The values and ties are those of transformers' ``from_pretrained``
    for the unwrapped model, in the dtypes of ``model``. A module that is not from transformers must have the stored
    names. Load before modules are replaced: a replaced module has other names than the checkpoint.

    A ``PeftModel`` takes two kinds of directories, in any order. One with ``adapter_config.json`` is loaded into its
    active adapter. Any other is loaded into the base model, and into the copies of ``modules_to_save``.

    Parameters in memory keep it, so existing optimizers remain valid. Parameters on the meta device are replaced, with
    the same class, attributes and ties. ``model.materialise()`` makes the buffers that are not in the files.

    A tensor that is not loaded has the initial weights of a model that is trained from scratch. On the meta device
    they are those of ``model.materialise()``, equal under any partition. A tensor in memory keeps its values.

    Beside the model, 32 MiB of memory are needed. A tensor that transformers makes from others, such as merged experts,
    needs up to twice its bytes meanwhile. If the files have a tied weight under several names, every rank reads and
    compares all of them. Files are mapped: a file that is truncated meanwhile can end the process (SIGBUS). Parameters
    in memory are read twice, first to look for NaN.

    Args:
        strict: ``False`` leaves out tensors of the files that the model lacks, and gives initial weights to tensors of
            the model that the files lack.
        ignore_mismatched_sizes: give initial weights to tensors that have another shape in the files.
        convert_dtype: convert floating tensors of another width to the dtypes of ``model``.
        dequantize: load weights in blocks of FP8 or MXFP4 in the dtypes of ``model``, as transformers dequantises them.
            Other quantised weights are refused.

    Returns:
        The differences, the same on every rank. The first rank of the job prints them to standard error.

    Raises:
        ValueError: for a directory without a checkpoint, a damaged file, and tensors that are missing, unexpected, of
            another shape, of another dtype or quantised. Every rank raises the same error for the whole model, before
            anything is changed. Values that are not a number are an error of the ranks that hold them, before the
            rank's part is changed.
        OSError: for a file that cannot be read, or was changed during the load.
        RuntimeError: for an optimizer that holds parameters on the meta device, and for a tensor that neither the files
            nor an initialiser give values.
    """
    check_wrapped(model, "load_pretrained")
    directory = Path(directory)
    target, stored = target_of(model, directory, dequantize)
    plan = loading_plan(target.module, target.expected, stored, target.quantiser)
    if target.quantiser is None:
        check_no_parts(plan.unexpected.values(), directory)
    found = fit(target.module, target.expected, target.tied_names, stored, plan)
    if target.quantiser is None:
        check_none_replaces(found.missing, plan.unexpected, stored, directory)
    accepted = Accepted(names=not strict, shapes=ignore_mismatched_sizes, widths=convert_dtype)
    check_fits(found, accepted, model.original_module, directory, target.remedy)
    report = found.report(target.copies)
    source = FileTensors(target, stored, found.provided)
    for names in target.tied_names:
        source.check_copies_are_equal([name for name in names if name in found.provided])

    conversions = source.local_conversions()
    # Values on the meta device are read once, and looked at before they replace anything.
    only_meta = all(tensor.is_meta for _, wanted in conversions for _, tensor in wanted)
    if not only_meta:
        source.check_numbers(conversions)

    without = source.local_without_values([*found.missing, *(each.name for each in found.misshaped)])
    replaced = list(zip(without, model.initial_weights_of(without), strict=True))
    for conversion, wanted in conversions:
        filled = [(name, _with_memory(tensor)) for name, tensor in wanted]
        source.fill(conversion, filled)
        if only_meta and any(has_nan(tensor) for _, tensor in filled):
            source.check_numbers([(conversion, wanted)])
        pairs = zip(wanted, filled, strict=True)
        replaced += [(tensor, real) for (_, tensor), (_, real) in pairs if real is not tensor]
    model.replace_local_tensors(replaced)
    # A second directory brings the rest of an adapted model.
    if target.is_whole or not any(tensor.is_meta for tensor in tensors_of(model.local_module).values()):
        model.materialise()
    if isinstance(target.module, PreTrainedModel):
        # from_pretrained stores the transforms here for save_pretrained to revert.
        target.module.__dict__["_weight_conversions"] = plan.used
    if target.quantiser is not None:
        forget_quantisation(target.module)
    print_once(report, directory, type(model.original_module).__name__)
    return report


_Wanted = list[tuple[Conversion, list[tuple[str, torch.Tensor]]]]


class FileTensors:
    """Tensors of a checkpoint, converted to those of a model by the conversions ``provided``."""

    def __init__(self, target: Target, stored: Mapping[str, StoredTensor], provided: Mapping[str, Conversion]) -> None:
        self._target = target
        self._stored = stored
        self._provided = provided

    def local_conversions(self) -> _Wanted:
        """Conversions that this rank needs, in the order of the files, each with the local tensors that it fills."""
        names = {name: names for names in self._target.tied_names for name in names}
        wanted: dict[Conversion, list[tuple[str, torch.Tensor]]] = {}
        seen: set[torch.Tensor] = set()
        for name, tensor in self._target.local.items():
            source = next((mate for mate in names.get(name, [name]) if mate in self._provided), None)
            if source is not None and tensor not in seen:
                seen.add(tensor)
                wanted.setdefault(self._provided[source], []).append((source, tensor))

        def position(conversion: Conversion) -> tuple[Path, int]:
            stored = self._stored[conversion.names[0]]
            return stored.path, stored.place

        return sorted(wanted.items(), key=lambda item: position(item[0]))

    def local_without_values(self, names: Collection[str]) -> list[torch.Tensor]:
        """This rank's tensors on the meta device that have one of ``names``, and get no values from the files."""
        loaded = {tensor for _, wanted in self.local_conversions() for _, tensor in wanted}
        tensors = (self._target.local[name] for name in names if name in self._target.local)
        return list(dict.fromkeys(tensor for tensor in tensors if tensor.is_meta and tensor not in loaded))

    def fill(self, conversion: Conversion, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Write the results of ``conversion`` to ``tensors`` of the same names."""
        if conversion.converter is None:
            stored = self._stored[conversion.names[0]]
            for _, tensor in tensors:
                stored.read_into(own_elements(tensor, stored.shape), division_of(tensor))
            return
        made = self._converted(conversion, tensors[0][1].dtype)
        for name, tensor in tensors:
            division = division_of(tensor)
            part = made[name] if division is None else division.take(made[name])
            own_elements(tensor, made[name].shape).copy_(part)

    def check_numbers(self, conversions: _Wanted) -> None:
        """Raise ``ValueError`` for a value of the sources of ``conversions`` that is not a number."""
        for conversion, wanted in conversions:
            # A rank looks at its part alone, if the files hold the tensor itself.
            divisions = {division_of(tensor) for _, tensor in wanted}
            division = divisions.pop() if conversion.converter is None and len(divisions) == 1 else None
            for name in conversion.names:
                if self._stored[name].has_nan(division):
                    raise ValueError(
                        f"{printable(name)} in {self._stored[name].path} has values that are not a number (NaN). "
                        f"Nothing was loaded. Copy or download the checkpoint again, or take one from before the loss "
                        f"became NaN. load_local_state_dict() takes any values."
                    )

    def check_copies_are_equal(self, names: list[str]) -> None:
        """Raise ``ValueError`` unless the stored tensors ``names``, one weight in the model, have equal values."""
        for name in names[1:]:
            if not self._are_equal(names[0], name, self._target.expected[name].dtype):
                raise ValueError(
                    f"{names[0]} and {name} are one tied weight in this {type(self._target.module).__name__}, "
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
        # Converted in the dtype of the model, as in from_pretrained. Quantised values have meaning in their own.
        own = self._target.quantiser is not None

        def read(name: str) -> torch.Tensor:
            return self._stored[name].read(self._stored[name].dtype if own else dtype)

        return conversion.convert(read, self._target.module)

    def _provided_from(self, name: str) -> StoredTensor:
        return self._stored[self._provided[name].names[0]]


def _with_memory(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself, or a CPU tensor like it if it is on the meta device."""
    if not tensor.is_meta:
        return tensor
    with torch.inference_mode(False):
        return with_type_of(torch.empty_like(tensor, device="cpu", requires_grad=False), tensor)
