"""Methods of transformers' models that a wrapped model does itself: recomputation of layers, and the save."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from nxdpp.pipeline.activation_checkpoint import CheckpointedModel, apply_checkpoint, is_checkpointed, remove_checkpoint

# Arguments with which apply_checkpoint recomputes.
_CHECKPOINT = {"use_reentrant": False, "preserve_rng_state": True}

# Arguments of transformers' save_pretrained that nxdpp.save_pretrained follows.
_SAVE = {
    "distributed_checkpoint": False,
    "max_shard_size": "50GB",
    "push_to_hub": False,
    "safe_serialization": True,
    "save_original_format": True,
    "save_peft_format": True,
    "state_dict": None,
    "token": None,
    "variant": None,
}


def save_directory_of(
    model: Any, directory: str | os.PathLike[str], positional: Sequence[Any], arguments: Mapping[str, Any]
) -> None:
    """Call ``nxdpp.save_pretrained(model, directory)``. Raises ``ValueError`` for arguments of another save."""
    if positional:
        raise ValueError(
            f"save_pretrained of a pipelined model takes the directory and is_main_process by position, and was given "
            f"{len(positional)} more: {', '.join(type(value).__name__ for value in positional)}. Leave them out: it "
            f"writes the weights of all ranks."
        )
    others = [name for name, value in arguments.items() if name not in _SAVE or value != _SAVE[name]]
    if others:
        raise ValueError(
            f"save_pretrained of a pipelined model writes the weights of all ranks, in files of at most 1 GB, and has "
            f"no {', '.join(others)}. Leave it out. To push, upload the directory from one process afterwards."
        )
    from nxdpp.checkpoint.huggingface.save import save_pretrained

    save_pretrained(model, directory)


def enable_checkpointing(
    model: CheckpointedModel, settings: Mapping[str, Any] | None, arguments: Mapping[str, Any]
) -> None:
    """Call ``apply_checkpoint`` for the layers of this rank that transformers does not recompute.

    Raises ``ValueError``, before anything is changed, for ``settings`` of another recomputation and for ``arguments``.
    """
    others = [f"{name}={value!r}" for name, value in (settings or {}).items() if _CHECKPOINT.get(name) is not value]
    if others or arguments:
        raise ValueError(
            f"gradient checkpointing of a pipelined model recomputes every layer with use_reentrant=False and "
            f"preserve_rng_state=True, and takes no {', '.join((*others, *arguments))}. Leave it out, or call "
            f"nxdpp.apply_checkpoint(model, layers_to_checkpoint=[...]) for some layers."
        )
    local = dict(model.local_named_modules())
    layers = [name for name in model.stage_layers if not is_recomputed(local[name])]
    if layers:
        apply_checkpoint(model, layers)


def disable_checkpointing(model: CheckpointedModel) -> None:
    """Keep the activations of this rank's layers."""
    remove_checkpoint(model)
    for module in dict(model.local_named_modules()).values():
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False  # type: ignore[assignment]  # a flag of transformers' layers


def is_recomputed(module: nn.Module) -> bool:
    """Return whether ``module``, or transformers for it, recomputes its forward in the backward."""
    return is_checkpointed(module) or getattr(module, "gradient_checkpointing", False) is True
