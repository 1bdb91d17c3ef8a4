"""Save of a model as a Hugging Face directory: each rank writes the tensors that it holds."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nxdpp.agreement.same_values import hash_of_all
from nxdpp.checkpoint.distributed.whole_state import gather_tensors
from nxdpp.checkpoint.files.checksummed_writer import check_dtype
from nxdpp.checkpoint.files.pieces import StoredLayout, layouts_of
from nxdpp.checkpoint.huggingface.adapter import is_adapted, names_in_files, write_adapter
from nxdpp.checkpoint.huggingface.model_tensors import (
    WrappedModel,
    as_in_files,
    check_no_padding,
    check_still_tied,
    check_wrapped,
    joined,
    tensors_of,
    tied_names_of,
)
from nxdpp.checkpoint.huggingface.write_directory import SavedDirectory, Shard, plan_shards, start_save
from nxdpp.counted import counted
from nxdpp.devices.kinds import readable
from nxdpp.gradients.expert_parameters import is_of_experts
from nxdpp.gradients.shards.local_tensors import is_sharded, local_rows
from nxdpp.pipeline.local.elsewhere_tensors import is_frozen_of_torchao
from nxdpp.pipeline.local.half_loaded import check_whole
from nxdpp.ranks import parallel_state
from nxdpp.ranks.exchange import Exchange
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.board import board
from nxdpp.tensor.rank_files import local_path
from nxdpp.tensor.shards import all_rows


def save_pretrained(model: WrappedModel, directory: str | os.PathLike[str]) -> None:
    """Write a wrapped ``model`` to ``directory`` in the format of transformers; collective over all ranks.

    ``from_pretrained(directory)``, and ``load_pretrained`` under any partition, give the same values. Names and layouts
    are as from transformers' ``save_pretrained``: merged experts are split again, and a tied weight is written once.
    Each rank of the first data-parallel replica writes its tensors. The first rank of a tensor group writes for the
    whole group, and divided tensors are gathered one at a time. A file has at most 1 GB, or one larger tensor. A
    single file is ``model.safetensors``. Several are ``model-00001-of-00004.safetensors`` and so on, with an index. A
    transformers model also gets ``config.json`` and, if it generates, ``generation_config.json``. Source files of
    custom code are not copied. ``directory`` is created if necessary, and all ranks must share it.

    A ``PeftModel`` gets the files of its adapters, as its own ``save_pretrained`` writes them: rank 0 needs memory for
    the adapters. The state of any other module is written whole, under its own names.

    Ranks exchange only names, shapes and dtypes. Tensors that are converted, not contiguous or not on the CPU are
    copied, for one file at a time. Other tensors need no memory.

    The files of an earlier checkpoint in ``directory`` are replaced when all are complete, and then removed. A save
    that fails or is killed at any moment leaves the earlier or the new checkpoint, complete. So the files keep a tag in
    their names (``model-1c5f09aa-00001-of-00004.safetensors``) where the usual names were in use on a file system
    without hard links, and a single file has an index where ``config.json`` changes. A differently configured adapter
    has a moment in which only ``load_pretrained`` finds it: its files are then in ``.unfinished/complete``.

    Raises:
        ValueError: before any write, for tensors on the meta device and for unsupported dtypes. Also for an adapter
            where ``directory`` has a whole model, and the other way round, and for an empty name.
        NotImplementedError: on every rank, before any write, for quantized models that are no ``PeftModel``, adapters
            of transformers itself (``add_adapter``), and tensors with parts on several stages.
        RuntimeError: on every rank, before any write, for copies of a tied weight that differ.
        OSError: on the rank that cannot write a file; the other ranks raise ``RuntimeError``.
    """
    check_wrapped(model, "save_pretrained")
    parallel_state.refuse_in_debug("save_pretrained")
    path = local_path(directory)
    failure_watch.refuse_after_failure()
    with board.call("save_pretrained"):
        _save(model, path)


def _save(model: WrappedModel, directory: Path) -> None:
    module, rank = model.original_module, dist.get_rank()
    consequence = f"{directory} was not written"
    exchange = Exchange(consequence=consequence)
    held = exchange.all_together(lambda: _layouts(model))
    if tied_names_of(model):
        _check_copies(exchange.gather(_copies(model)), consequence)
    if is_adapted(module):
        _save_adapter(model, directory, exchange, consequence)
        return
    shards = exchange.together(lambda: plan_shards(module, tied_names_of(model), held))
    saved = SavedDirectory(directory, shards)
    try:
        local = _local_tensors(model)
        exchange.from_first(lambda: start_save(directory, is_adapter=False))
        exchange.together(lambda: saved.write(rank, lambda shard: _tensors(model, local, shard), _writer(local)))
        exchange.from_first(lambda: saved.finish(module))
    except Exception:
        saved.remove_unfinished(rank)
        raise


def _save_adapter(model: WrappedModel, directory: Path, exchange: Exchange, consequence: str) -> None:
    module: Any = model.original_module
    names = exchange.from_first(lambda: names_in_files(module))
    tensors = gather_tensors(model, consequence, names)

    def write() -> None:
        # Adapters with different names have folders of their own.
        start_save(directory, is_adapter="default" in module.peft_config)
        write_adapter(module, tensors or {}, directory)

    exchange.from_first(write)


def _layouts(model: WrappedModel) -> dict[str, StoredLayout] | None:
    """Layouts of the tensors that this rank can write; None on ranks of the other replicas."""
    _check_can_be_saved(model)
    if parallel_state.get_replica_rank() > 0 or parallel_state.get_tensor_model_parallel_rank() > 0:
        return None
    local = {name: as_in_files(tensor) for name, tensor in tensors_of(model.local_module).items()}
    for name, tensor in local.items():
        check_dtype(name, tensor.dtype, packed=True)
    return layouts_of(local)


def _copies(model: WrappedModel) -> dict[tuple[str, int, int], bytes]:
    """Hashes of this rank's tied tensors, by first name, replica and tensor-parallel rank."""
    local = _local_tensors(model)
    place = parallel_state.get_replica_rank(), parallel_state.get_tensor_model_parallel_rank()
    firsts = [names[0] for names in tied_names_of(model)]
    return {(name, *place): hash_of_all(local_rows(local[name])) for name in firsts if name in local}


def _check_copies(of_ranks: Sequence[Mapping[tuple[str, int, int], bytes]], consequence: str) -> None:
    """Raise ``RuntimeError`` for copies of a tied tensor that differ: one of them would be lost."""
    first: dict[tuple[str, int, int], tuple[int, bytes]] = {}
    for rank, copies in enumerate(of_ranks):
        for place, found in copies.items():
            other, expected = first.setdefault(place, (rank, found))
            if found != expected:
                raise RuntimeError(
                    f"{place[0]}, which is tied, has other values on rank {rank} than on rank {other}: {consequence}. "
                    f"Change it on every rank. move_model_to_device() gives all copies the values of the first."
                )


def _writer(local: Mapping[str, torch.Tensor]) -> int | None:
    """The rank that writes the files of this rank's tensor group in the first replica.

    ``None`` on ranks of the other replicas, unless they have shards or experts of the ``local`` tensors.
    """
    has_parts = any(is_sharded(each) or is_of_experts(each) for each in local.values())
    if parallel_state.get_replica_rank() > 0 and not has_parts:
        return None
    replicas = parallel_state.get_replica_group(as_list=True)
    first = next(group[0] for group in replicas if dist.get_rank() in group)
    groups = parallel_state.get_tensor_model_parallel_group(as_list=True)
    return next(group[0] for group in groups if first in group)


def _check_can_be_saved(model: WrappedModel) -> None:
    check_no_padding(model.local_module)
    module = model.original_module
    is_quantized = any(map(is_frozen_of_torchao, model.local_module.parameters()))
    for kind, is_there in {
        "quantized models": is_quantized or getattr(module, "hf_quantizer", None),
        "models with add_adapter()": getattr(module, "peft_config", None),
    }.items():
        # Only the adapters of a PeftModel are written.
        if is_there and not is_adapted(module):
            raise NotImplementedError(f"saving {kind} is not implemented: save local_state_dict() on each rank.")
    check_whole(model.local_module)
    local = tensors_of(model.local_module)
    check_still_tied(local, tied_names_of(model))
    on_meta = [name for name, tensor in local.items() if tensor.is_meta]
    if on_meta:
        raise ValueError(
            f"{counted(len(on_meta), 'tensor of this rank is', 'tensors of this rank are')} on the meta device, "
            f"without values to save ({on_meta[0]} is the first): call load_pretrained(model, DIRECTORY) or "
            "model.materialise()."
        )


def _local_tensors(model: WrappedModel) -> dict[str, torch.Tensor]:
    """The tensors of this rank by name, a tied one under all its names."""
    local = tensors_of(model.local_module)
    for names in tied_names_of(model):
        held = next((local[name] for name in names if name in local), None)
        if held is not None:
            local |= dict.fromkeys(names, held)
    return local


def _tensors(model: WrappedModel, local: Mapping[str, torch.Tensor], shard: Shard) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    if parallel_state.get_replica_rank() > 0:
        for name in (name for conversion in shard.conversions for name in conversion.names):
            joined(local[name]) if is_of_experts(local[name]) else all_rows(local[name])
        return made
    for conversion in shard.conversions:
        made |= conversion.convert(lambda name: readable(joined(local[name])), model.original_module)
    assert layouts_of(made) == shard.layouts
    return made
