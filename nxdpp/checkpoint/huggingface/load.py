"""Load of a Hugging Face directory: each rank reads only the tensors that it holds."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from nxdpp.checkpoint.distributed.ranks import Exchange
from nxdpp.checkpoint.distributed.shared_reads import SharedReads
from nxdpp.checkpoint.files.safetensors_reader import has_nan
from nxdpp.checkpoint.huggingface.conversion import Conversion, loading_plan
from nxdpp.checkpoint.huggingface.file_tensors import FileTensors, Wanted
from nxdpp.checkpoint.huggingface.load_target import Target, target_of
from nxdpp.checkpoint.huggingface.mismatch import Accepted, LoadReport, check_fits, fit, print_once
from nxdpp.checkpoint.huggingface.model_tensors import WrappedModel, check_wrapped, place_in_files, tensors_of
from nxdpp.checkpoint.huggingface.quantised import check_no_parts, check_none_replaces, forget_quantisation
from nxdpp.checkpoint.huggingface.read_directory import Contents, contents_of
from nxdpp.devices.kinds import readable
from nxdpp.initialization.allocation import with_type_of
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.board import board
from nxdpp.tensor.rank_files import local_path


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
    sizes = {conversion: plan.source.size_of(conversion) for conversion, _ in plan.conversions}
    reads = SharedReads(exchange, sizes, f"{contents.digest} {plan.described()}")
    # Values on the meta device are read once, and looked at before they replace anything.
    only_meta = all(tensor.is_meta for _, wanted in plan.conversions for _, tensor in wanted)
    # With the same files on all ranks one rank compares the copies of each weight.
    tied = plan.tied[exchange.rank :: exchange.ranks] if len(set(digests)) == 1 else plan.tied
    exchange.together(lambda: _check(plan, tied, reads, only_meta))
    filled = exchange.together(lambda: _read(plan, reads, only_meta))
    reads.send(filled)
    exchange.together(lambda: _take_over(model, plan, filled))
    print_once(plan.report, directory, type(model.original_module).__name__)
    return plan.report


@dataclass(frozen=True)
class _Plan:
    """The tensors to load; only headers were read.

    Attributes:
        target: the tensors of the model.
        source: the tensors of the files.
        tied: names in the files of each weight that has several there.
        conversions: the conversions of this rank.
        initial: tensors on the meta device that get initial weights, and these weights.
        used: transforms that ``save_pretrained`` reverts.
        report: differences between the model and the files.
    """

    target: Target
    source: FileTensors
    tied: list[list[str]]
    conversions: Wanted
    initial: list[tuple[torch.Tensor, torch.Tensor]]
    used: list[Any] | None
    report: LoadReport

    def described(self) -> str:
        """The conversions with the tensors that they fill, for a comparison with other ranks."""
        return repr(
            [
                (
                    conversion.names,
                    [(name, each.shape, each.stride(), each.dtype, place_in_files(each)) for name, each in wanted],
                )
                for conversion, wanted in self.conversions
            ]
        )


def _plan(model: WrappedModel, contents: Contents, accepted: Accepted, dequantize: bool) -> _Plan:
    target, stored = target_of(model, contents, dequantize)
    plan = loading_plan(target.module, target.expected, stored, target.quantiser)
    if target.quantiser is None:
        check_no_parts(plan.unexpected.values(), contents.directory)
    found = fit(target.module, target.expected, target.tied_names, stored, plan)
    if target.quantiser is None:
        check_none_replaces(found.missing, plan.unexpected, stored, contents.directory)
    check_fits(found, accepted, model.original_module, contents.directory, target.remedy)
    source = FileTensors(target, stored, found.provided)
    tied = [[name for name in names if name in found.provided] for names in target.tied_names]
    conversions = source.local_conversions()
    without = source.local_without_values([*found.missing, *(each.name for each in found.misshaped)])
    initial = list(zip(without, model.initial_weights_of(without), strict=True))
    report = found.report(target.copies)
    return _Plan(target, source, [names for names in tied if len(names) > 1], conversions, initial, plan.used, report)


def _check(plan: _Plan, tied: list[list[str]], reads: SharedReads[Conversion], only_meta: bool) -> None:
    for names in tied:
        plan.source.check_copies_are_equal(names)
    if not only_meta:
        plan.source.check_numbers([each for each in plan.conversions if reads.is_here(each[0])])


def _read(plan: _Plan, reads: SharedReads[Conversion], only_meta: bool) -> dict[Conversion, list[torch.Tensor]]:
    """The tensors with memory that each conversion fills; the ones that this rank reads have their values."""
    filled = {conversion: [_with_memory(tensor) for _, tensor in wanted] for conversion, wanted in plan.conversions}
    for conversion, wanted in plan.conversions:
        if not reads.is_here(conversion):
            continue
        board.moved()
        tensors = filled[conversion]
        plan.source.fill(conversion, [(name, real) for (name, _), real in zip(wanted, tensors, strict=True)])
        if only_meta and any(map(has_nan, tensors)):
            plan.source.check_numbers([(conversion, wanted)])
    return filled


def _take_over(model: WrappedModel, plan: _Plan, filled: Mapping[Conversion, list[torch.Tensor]]) -> None:
    replaced = list(plan.initial)
    for conversion, wanted in plan.conversions:
        for (_, tensor), real in zip(wanted, filled[conversion], strict=True):
            if tensor.is_meta:
                replaced.append((tensor, real))
            elif real is not tensor:
                with torch.no_grad():
                    tensor.copy_(real)
    model.replace_local_tensors(replaced)
    target = plan.target
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
