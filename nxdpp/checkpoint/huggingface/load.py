"""Load of a Hugging Face directory: each rank reads only the tensors that it holds."""

import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from nxdpp.checkpoint.distributed.ranks import Exchange
from nxdpp.checkpoint.distributed.rectangles import placement_of
from nxdpp.checkpoint.distributed.shared_reads import SharedReads
from nxdpp.checkpoint.files.pieces import printable
from nxdpp.checkpoint.files.safetensors_reader import StoredTensor, has_nan
from nxdpp.checkpoint.huggingface.conversion import Conversion, loading_plan
from nxdpp.checkpoint.huggingface.load_target import Target, target_of
from nxdpp.checkpoint.huggingface.mismatch import Accepted, Fit, LoadReport, check_fits, fit
from nxdpp.checkpoint.huggingface.model_tensors import (
    WrappedModel,
    check_wrapped,
    own_blocks,
    tensors_of,
)
from nxdpp.checkpoint.huggingface.quantised import check_no_parts, check_none_replaces, forget_quantisation
from nxdpp.checkpoint.huggingface.read_directory import Contents, contents_of
from nxdpp.devices.kinds import readable
from nxdpp.initialization.allocation import with_type_of
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.board import board
from nxdpp.tensor.rank_files import local_path

Wanted = list[tuple[Conversion, list[tuple[str, torch.Tensor]]]]
"""Conversions, each with the names and local tensors that it fills."""


def load_pretrained(
    model: WrappedModel,
    directory: str | os.PathLike[str],
    *,
    strict: bool = True,
    ignore_mismatched_sizes: bool = False,
    convert_dtype: bool = False,
    dequantize: bool = False,
) -> LoadReport:
    """Load this rank's part of the Hugging Face ``directory`` into a wrapped ``model``; collective over all ranks.

    One rank of each host reads the headers of ``model.safetensors``, or of the files in
    ``model.safetensors.index.json``, for all its ranks. Data-parallel replicas divide the reading of values, and send
    them to each other. Tensor-parallel ranks read their parts, and each its own copy of an undivided tensor. A rank
    takes the values of its own parameters and persistent buffers. Hosts may have copies of the directory.

    Values and ties are what transformers' ``from_pretrained`` gives the unwrapped model, in the dtypes of ``model``. A
    module that is not from transformers must have the stored names. Load before modules are replaced: the names of a
    replaced module differ from the checkpoint's.

    A ``PeftModel`` takes two kinds of directories, in any order. One with ``adapter_config.json`` is loaded into its
    active adapter. Any other is loaded into the base model, and into the copies of ``modules_to_save``.

    Parameters in memory keep it, so existing optimizers remain valid. Parameters on the meta device are replaced, with
    the same class, attributes and ties. ``model.materialise()`` makes the buffers that are not in the files.

    A tensor that is not loaded has the initial weights of a model that is trained from scratch. On the meta device
    it gets the values of ``model.materialise()``, equal under any partition. A tensor in memory keeps its values.

    The load needs 32 MiB of memory besides the model. A tensor that transformers makes from others, such as merged
    experts, briefly needs up to twice its bytes. If the files have a tied weight under several names, one rank reads
    and compares all of them. Parameters in memory are read twice, first to look for NaN.

    Args:
        strict: ``False`` leaves out tensors of the files that the model lacks, and gives initial weights to tensors of
            the model that the files lack.
        ignore_mismatched_sizes: give initial weights to tensors that have a different shape in the files.
        convert_dtype: convert floating tensors of a different width to the dtypes of ``model``.
        dequantize: load weights in blocks of FP8 or MXFP4 in the dtypes of ``model``, as transformers dequantises them.
            Other quantised weights are refused.

    Returns:
        The differences, the same on every rank. The first rank of the job prints them to standard error.

    Raises:
        ValueError: for a directory without a checkpoint, a damaged file, and tensors that are missing, unexpected, of
            a different shape or dtype, or quantised, and for values that are not a number. Every rank raises an
            error, before anything is changed.
        OSError: on the rank that cannot read a file, or finds it changed during the load. Other ranks raise
            ``RuntimeError``. Parameters in memory may have values of the files then.
        RuntimeError: for an optimizer that holds parameters on the meta device, and for a tensor that neither the files
            nor an initialiser give values.
    """
    check_wrapped(model, "load_pretrained")
    failure_watch.refuse_after_failure()
    accepted = Accepted(names=not strict, shapes=ignore_mismatched_sizes, widths=convert_dtype)
    with board.call("load_pretrained"):
        return _load(model, local_path(directory), accepted, dequantize)


def _load(model: WrappedModel, directory: Path, accepted: Accepted, dequantize: bool) -> LoadReport:
    exchange = Exchange(consequence=f"{directory} was not loaded", kinds=(ValueError,))
    contents = contents_of(directory, exchange)
    plan = exchange.together(lambda: _plan(model, contents, accepted, dequantize))
    digests = exchange.all_of(contents.digest)
    reads = SharedReads(exchange, plan.source.sizes(), f"{contents.digest} {plan.source.described()}")
    # With the same files on all ranks one rank compares the copies of each weight.
    tied = plan.source.tied[exchange.rank :: exchange.ranks] if len(set(digests)) == 1 else plan.source.tied
    exchange.together(lambda: _check(plan.source, tied, reads))
    filled = exchange.together(lambda: _read(plan.source, reads))
    reads.send(filled)
    exchange.together(lambda: _take_over(model, plan, filled))
    if plan.report and exchange.rank == 0:
        kind = type(model.original_module).__name__
        print(f"{directory} has other tensors than this {kind}:\n{plan.report}", file=sys.stderr, flush=True)
    return plan.report


class _Plan(NamedTuple):
    """The tensors to load; only headers were read.

    Attributes:
        source: the tensors of the files.
        initial: tensors on the meta device that get initial weights, and these weights.
        used: transforms that ``save_pretrained`` reverts.
        report: differences between the model and the files.
    """

    source: "FileTensors"
    initial: list[tuple[torch.Tensor, torch.Tensor]]
    used: list[Any] | None
    report: LoadReport


def _plan(model: WrappedModel, contents: Contents, accepted: Accepted, dequantize: bool) -> _Plan:
    target, stored = target_of(model, contents, dequantize)
    source, found = fitting_tensors(target, stored, accepted, contents.directory, type(model.original_module))
    without = source.local_without_values([*found.missing, *(each.name for each in found.misshaped)])
    initial = list(zip(without, model.initial_weights_of(without), strict=True))
    return _Plan(source, initial, found.used, found.report(target.copies))


def fitting_tensors(
    target: Target, stored: Mapping[str, StoredTensor], accepted: Accepted, directory: Path, kind: type[nn.Module]
) -> tuple["FileTensors", Fit]:
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


def _check(source: "FileTensors", tied: list[list[str]], reads: SharedReads[Conversion]) -> None:
    for names in tied:
        source.check_copies_are_equal(names)
    if not source.only_meta:
        source.check_numbers([each for each in source.conversions if reads.is_here(each[0])])


def _read(source: "FileTensors", reads: SharedReads[Conversion]) -> dict[Conversion, list[torch.Tensor]]:
    """The tensors with memory that each conversion fills; the ones that this rank reads have their values."""
    filled = {conversion: [_with_memory(tensor) for _, tensor in wanted] for conversion, wanted in source.conversions}
    for conversion, wanted in source.conversions:
        if not reads.is_here(conversion):
            continue
        board.moved()
        tensors = filled[conversion]
        source.fill(conversion, [(name, real) for (name, _), real in zip(wanted, tensors, strict=True)])
        if source.only_meta and any(map(has_nan, tensors)):
            source.check_numbers([(conversion, wanted)])
    return filled


def _take_over(model: WrappedModel, plan: _Plan, filled: Mapping[Conversion, list[torch.Tensor]]) -> None:
    replaced = list(plan.initial)
    for conversion, wanted in plan.source.conversions:
        for (_, tensor), real in zip(wanted, filled[conversion], strict=True):
            if tensor.is_meta:
                replaced.append((tensor, real))
            elif real is not tensor:
                with torch.no_grad():
                    tensor.copy_(real)
    model.replace_local_tensors(replaced)
    target = plan.source.target
    # A second directory brings the rest of an adapted model.
    if target.is_whole or not any(tensor.is_meta for tensor in tensors_of(model.local_module).values()):
        model.materialise()
    if isinstance(target.module, PreTrainedModel):
        # from_pretrained stores the transforms here for save_pretrained to revert.
        target.module.__dict__["_weight_conversions"] = plan.used
    if target.quantiser is not None:
        forget_quantisation(target.module)


def _with_memory(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself, or a CPU tensor like it if it is on the meta device, or on one that records operations."""
    with torch.inference_mode(False):
        values = torch.empty_like(tensor, device="cpu", requires_grad=False) if tensor.is_meta else readable(tensor)
        return tensor if values is tensor else with_type_of(values, tensor)


class FileTensors:
    """Tensors of a checkpoint, converted to tensors of a model by the conversions ``provided``.

    Attributes:
        target: the tensors of the model.
        tied: names in the files of each weight that has several there.
        conversions: the ones that this rank needs, in the order of the files.
        only_meta: all tensors that they fill are on the meta device. Their values are read once, and looked at before
            they replace anything.
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
