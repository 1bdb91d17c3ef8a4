"""Load of a Hugging Face directory: each rank reads only the tensors that it holds."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from nxdpp.checkpoint.distributed.shared_reads import SharedReads
from nxdpp.checkpoint.files.safetensors_reader import has_nan
from nxdpp.checkpoint.huggingface.conversion import Conversion
from nxdpp.checkpoint.huggingface.file_tensors import FileTensors, fitting_tensors
from nxdpp.checkpoint.huggingface.load_target import target_of
from nxdpp.checkpoint.huggingface.mismatch import Accepted, Fit, LoadReport
from nxdpp.checkpoint.huggingface.model_tensors import WrappedModel, check_wrapped, tensors_of
from nxdpp.checkpoint.huggingface.quantised import forget_quantisation
from nxdpp.checkpoint.huggingface.read_directory import Contents, contents_of
from nxdpp.devices.kinds import readable
from nxdpp.gradients.shards.local_tensors import is_sharded, local_rows
from nxdpp.ground.transformers_names import CONVERSIONS
from nxdpp.initialization.allocation import with_type_of
from nxdpp.pipeline.local import half_loaded
from nxdpp.ranks import parallel_state
from nxdpp.ranks.exchange import Exchange
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
            ``RuntimeError``. Where parameters in memory may have values of the files then, steps and saves are refused
            until a load succeeds.
        RuntimeError: for an optimizer that holds parameters on the meta device, and for a tensor that neither the files
            nor an initialiser give values.
    """
    check_wrapped(model, "load_pretrained")
    failure_watch.refuse_after_failure()
    accepted = Accepted(names=not strict, shapes=ignore_mismatched_sizes, widths=convert_dtype)
    with board.call("load_pretrained"):
        return _load(model, local_path(directory), accepted, dequantize)


def _load(model: WrappedModel, directory: Path, accepted: Accepted, dequantize: bool) -> LoadReport:
    exchange = Exchange(consequence=f"{directory} was not loaded")
    contents = contents_of(directory, exchange)
    source, found, initial = exchange.together(lambda: _plan(model, contents, accepted, dequantize))
    digests = exchange.gather(contents.digest)
    reads = SharedReads(exchange, source.sizes(), f"{contents.digest} {source.described()}")
    # With the same files on all ranks one rank compares the copies of each weight.
    tied = source.tied[exchange.rank :: exchange.ranks] if len(set(digests)) == 1 else source.tied
    exchange.together(lambda: _check(source, tied, reads))
    try:
        filled = exchange.together(lambda: _read(source, reads))
        reads.send({each: list(map(local_rows, tensors)) for each, tensors in filled.items()})
        exchange.together(lambda: _take_over(model, source, found.used, initial, filled))
    except BaseException as error:
        if not source.only_meta:
            sentence = f"The load of {directory} failed midway ({type(error).__name__}: {error})."
            half_loaded.mark(model.local_module, sentence, [])
        raise
    if source.target.is_whole and not (found.missing or found.misshaped):
        half_loaded.clear(model.local_module)
    report = found.report(source.target.copies)
    # In the debug mode every stage is the only rank.
    place = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    if report and exchange.rank == 0 and not any(place):
        kind = type(model.original_module).__name__
        print(f"{directory} has other tensors than this {kind}:\n{report}", file=sys.stderr, flush=True)
    return report


def _plan(
    model: WrappedModel, contents: Contents, accepted: Accepted, dequantize: bool
) -> tuple[FileTensors, Fit, list[tuple[torch.Tensor, torch.Tensor]]]:
    """The tensors to load, how they fit, and tensors on the meta device with initial weights for them."""
    target, stored = target_of(model, contents, dequantize)
    source, found = fitting_tensors(target, stored, accepted, contents.directory, type(model.original_module))
    without = source.local_without_values([*found.missing, *(each.name for each in found.misshaped)])
    return source, found, list(zip(without, model.initial_weights_of(without), strict=True))


def _check(source: FileTensors, tied: list[list[str]], reads: SharedReads[Conversion]) -> None:
    for names in tied:
        source.check_copies_are_equal(names)
    if not source.only_meta:
        source.check_numbers([each for each in source.conversions if reads.is_here(each[0])])


def _read(source: FileTensors, reads: SharedReads[Conversion]) -> dict[Conversion, list[torch.Tensor]]:
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


def _take_over(
    model: WrappedModel,
    source: FileTensors,
    used: list[Any] | None,
    initial: Sequence[tuple[torch.Tensor, torch.Tensor]],
    filled: Mapping[Conversion, list[torch.Tensor]],
) -> None:
    replaced = list(initial)
    for conversion, wanted in source.conversions:
        for (_, tensor), real in zip(wanted, filled[conversion], strict=True):
            if tensor.is_meta:
                replaced.append((tensor, real))
            elif real is not tensor:
                with torch.no_grad():
                    tensor.copy_(real)
    model.replace_local_tensors(replaced)
    target = source.target
    # A second directory brings the rest of an adapted model.
    if target.is_whole or not any(tensor.is_meta for tensor in tensors_of(model.local_module).values()):
        model.materialise()
    if isinstance(target.module, PreTrainedModel):
        # from_pretrained stores the transforms here for save_pretrained to revert.
        vars(target.module)[CONVERSIONS.name] = used
    if target.quantiser is not None:
        forget_quantisation(target.module)


def _with_memory(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself, or a CPU tensor like it if it is on the meta device, or on one that records operations."""
    with torch.inference_mode(False):
        if is_sharded(tensor):
            return tensor
        values = torch.empty_like(tensor, device="cpu", requires_grad=False) if tensor.is_meta else readable(tensor)
        return tensor if values is tensor else with_type_of(values, tensor)
