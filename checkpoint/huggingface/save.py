"""Saving a pipelined model as a Hugging Face directory: every rank writes what it holds."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from nxdpp.checkpoint.files.safetensors_writer import check_dtypes
from nxdpp.checkpoint.huggingface.model_tensors import check_wrapped, tensors_of
from nxdpp.checkpoint.huggingface.save_plan import Layout, Shard, plan_shards
from nxdpp.checkpoint.huggingface.write_directory import SavedDirectory
from nxdpp.parallel_layers import parallel_state
from nxdpp.parallel_layers.all_ranks import from_all_ranks, together
from nxdpp.pipeline.model import NxDPPModel


def save_pretrained(model: NxDPPModel, directory: str | os.PathLike[str]) -> None:
    """Write a wrapped ``model`` to ``directory`` as transformers would the whole one; collective over all ranks.

    ``from_pretrained(directory)``, and ``load_pretrained`` under any partition, give the same values. Names and
    layout of the tensors are those of transformers' own ``save_pretrained``: merged experts are split again, a tied
    weight is written once. Every rank of the first data-parallel replica writes what it holds, in files of up to 1 GB
    and of larger tensors; a lone one is ``model.safetensors``, several are ``model-00001-of-00004.safetensors`` and
    so on over all ranks, with an index.
    ``config.json`` and, for a model that generates, ``generation_config.json`` stand beside them; a module that is
    not transformers' has neither, and source files of custom code are not copied. ``directory``, made where it is not
    there, is to be one that all ranks share.

    Only names, shapes and dtypes go between ranks. A rank needs no memory beside the model's for tensors that are
    written as they are, from the CPU and contiguous; others are copied, those of one file at a time. Files get their
    names once all are whole, the index, or the lone file, last: a save that fails before leaves an earlier checkpoint
    there as it was, one that is killed in between leaves neither. The shards of an earlier checkpoint are removed.

    Raises on every rank, before anything is written, ``ValueError`` for tensors on the meta device and for dtypes
    that safetensors has not, ``NotImplementedError`` for quantized models, adapters, tensor parallelism, and tensors
    that would be made of parts on several ranks; and for what cannot be written ``OSError`` on its rank and
    ``RuntimeError`` on the others.
    """
    check_wrapped(model, "save_pretrained")
    parallel_state.refuse_in_debug("save_pretrained")
    module, rank = model.original_module, dist.get_rank()
    unless = f"{directory} was not written"
    everyone = from_all_ranks(together(lambda: _layouts(model), unless))
    shards = together(lambda: plan_shards(module, model.tied_names, everyone), unless)
    saved = SavedDirectory(Path(directory), shards)
    try:
        local = _local_tensors(model)
        together(lambda: saved.write(rank, lambda shard: _tensors(model, local, shard)), unless)
        together(lambda: saved.finish(module) if rank == 0 else None, unless)
    except Exception:
        saved.remove_unfinished(rank)
        raise


def _layouts(model: NxDPPModel) -> dict[str, Layout] | None:
    """The tensors that this rank can write; none on replicas of the first pipeline."""
    _check_can_be_saved(model)
    if parallel_state.get_data_parallel_rank() > 0:
        return None
    local = tensors_of(model.local_module)
    check_dtypes((name, tensor.dtype) for name, tensor in local.items())
    return {name: Layout(tuple(tensor.shape), tensor.dtype) for name, tensor in local.items()}


def _check_can_be_saved(model: NxDPPModel) -> None:
    if parallel_state.get_tensor_model_parallel_size() > 1:
        raise NotImplementedError(
            f"saving over {parallel_state.get_tensor_model_parallel_size()} tensor-parallel ranks is not built: save "
            f"local_state_dict() on each."
        )
    for sign, kind in (("hf_quantizer", "quantized models"), ("_hf_peft_config_loaded", "models with adapters")):
        if getattr(model.original_module, sign, None):
            raise NotImplementedError(f"saving {kind} is not built: save local_state_dict() on each rank.")
    local = tensors_of(model.local_module)
    on_meta = [name for name, tensor in local.items() if tensor.is_meta]
    if on_meta:
        raise ValueError(
            f"{len(on_meta)} of the {len(local)} tensors of this rank are on the meta device and have no values to "
            f"save, the first of them {on_meta[0]}: call load_pretrained(model, DIRECTORY) or model.materialise()."
        )


def _local_tensors(model: NxDPPModel) -> dict[str, torch.Tensor]:
    """The tensors that this rank holds, tied ones under all their names."""
    local = tensors_of(model.local_module)
    for names in model.tied_names:
        held = next((local[name] for name in names if name in local), None)
        if held is not None:
            local |= dict.fromkeys(names, held)
    return local


def _tensors(model: NxDPPModel, local: Mapping[str, torch.Tensor], shard: Shard) -> dict[str, torch.Tensor]:
    """What ``shard`` is to hold, made of the ``local`` tensors."""
    made: dict[str, torch.Tensor] = {}
    for conversion in shard.conversions:
        made |= conversion.convert(lambda name: local[name].detach(), model.original_module)
    assert {name: Layout(tuple(tensor.shape), tensor.dtype) for name, tensor in made.items()} == shard.layouts
    return made
