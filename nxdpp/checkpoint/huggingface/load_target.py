"""The part of a model that a directory is loaded into: the whole model, its adapter, or the base model under it."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from nxdpp.checkpoint.files.safetensors_reader import StoredTensor
from nxdpp.checkpoint.huggingface.adapter import adapter_names, base_names, is_adapted, learns_prompts
from nxdpp.checkpoint.huggingface.model_tensors import WrappedModel, as_in_files, tensors_of, tied_names_of
from nxdpp.checkpoint.huggingface.quantised import quantiser_of
from nxdpp.checkpoint.huggingface.read_directory import ADAPTER_CONFIG, ADAPTER_FILE, Contents

_FITTING = (
    "Wrap a model with the class and configuration of the checkpoint. To change its class, load it once with "
    "transformers' CLASS.from_pretrained and save that model."
)
_INSIDE = (
    "Give a directory that nxdpp.save_pretrained wrote for such a module, or build the module around "
    "CLASS.from_pretrained(DIRECTORY)."
)


@dataclass(frozen=True)
class Target:
    """Tensors that are loaded, under the names that they have in the files.

    Attributes:
        module: the module of the names; a transformers model has conversions.
        expected: the tensors of the whole target, a divided one whole and on the meta device.
        local: the tensors of this rank.
        tied_names: the names of each tensor that has several.
        is_whole: ``True`` for the whole model.
        remedy: what to do about files with other tensors.
        quantiser: dequantises the tensors of the files; ``None`` for plain ones.
        copies: names of tensors that are copies of others next to an adapter.
    """

    module: nn.Module
    expected: dict[str, torch.Tensor]
    local: dict[str, torch.Tensor]
    tied_names: list[list[str]]
    is_whole: bool = True
    remedy: str = _FITTING
    quantiser: Any | None = None
    copies: Collection[str] = ()


def target_of(model: WrappedModel, contents: Contents, dequantize: bool) -> tuple[Target, dict[str, StoredTensor]]:
    """Return the target of ``contents`` in ``model``, and the tensors of the files.

    Raises ``ValueError`` for a directory that cannot be read, for an adapter of a model that has none, and for
    quantised weights unless ``dequantize``.
    """
    module, directory = model.original_module, contents.directory
    if contents.adapter is None:
        target = _base(model) if is_adapted(module) else _whole(model)
        quantiser = quantiser_of(directory, contents.settings, dequantize, target.module)
        return replace(target, quantiser=quantiser), contents.tensors
    if not is_adapted(module):
        raise ValueError(
            f"{directory} holds an adapter ({ADAPTER_CONFIG}), and this {type(module).__name__} is not a PeftModel: "
            f"wrap the result of peft.get_peft_model(model, config)."
        )
    if contents.lacks_weights:
        raise ValueError(f"{directory} has {ADAPTER_CONFIG} and no {ADAPTER_FILE}: save the adapter as safetensors.")
    return _adapter(model), contents.tensors


def _whole(model: WrappedModel) -> Target:
    module = model.original_module
    holds_model = any(isinstance(child, PreTrainedModel) for child in module.modules())
    remedy = _INSIDE if holds_model and not isinstance(module, PreTrainedModel) else _FITTING
    expected = {name: as_in_files(tensor) for name, tensor in tensors_of(module).items()}
    return Target(module, expected, tensors_of(model.local_module), tied_names_of(model), is_whole=True, remedy=remedy)


def _adapter(model: WrappedModel) -> Target:
    module: Any = model.original_module
    adapter = module.active_adapter
    if learns_prompts(module, adapter):
        names = {"prompt_embeddings": _prompt_embedding(module, adapter)}
    else:
        names = adapter_names(module, adapter)
    remedy = (
        f"Wrap a model with the adapter of {ADAPTER_CONFIG}: get_peft_model(model, PeftConfig.from_pretrained(...))."
    )
    return _named(model, list(names.items()), nn.Module(), remedy)


def _prompt_embedding(module: Any, adapter: str) -> str:
    parameters = [name for name, _ in module.prompt_encoder[adapter].named_parameters()]
    if parameters != ["embedding.weight"] and not module.peft_config[adapter].inference_mode:
        raise ValueError(
            f"PEFT saves the output of the prompt encoder of {adapter!r} ({module.peft_config[adapter].peft_type}), "
            f"from which its parameters do not follow. Continue training with local_state_dict() and "
            f"load_local_state_dict()."
        )
    return f"prompt_encoder.{adapter}.embedding.weight"


def _base(model: WrappedModel) -> Target:
    module: Any = model.original_module
    names: dict[str, str] = {}
    for name, full in base_names(module):
        # Copies next to the adapter take the values of the original, as if the adapter was made after the load.
        names[name if name not in names else f"{name} as {full}"] = full
    remedy = (
        f"For an adapter, give a directory with {ADAPTER_CONFIG}. Wrap a model whose base has the class and "
        f"configuration of the checkpoint."
    )
    copies: dict[str, list[str]] = {}
    for name in names:
        copies.setdefault(name.partition(" as ")[0], []).append(name)
    target = _named(model, list(names.items()), module.get_base_model(), remedy)
    tied = _joined([*target.tied_names, *(group for group in copies.values() if len(group) > 1)])
    return replace(target, tied_names=tied, copies=names.keys() - copies.keys())


def _named(model: WrappedModel, names: list[tuple[str, str]], module: nn.Module, remedy: str) -> Target:
    tensors, local = tensors_of(model.original_module), tensors_of(model.local_module)
    by_full: dict[str, list[str]] = {}
    for name, full in names:
        by_full.setdefault(full, []).append(name)
    tied = [[name for full in group for name in by_full.get(full, [])] for group in tied_names_of(model)]
    return Target(
        module,
        {name: as_in_files(tensors[full]) for name, full in names},
        {name: local[full] for name, full in names if full in local},
        [group for group in tied if len(group) > 1],
        False,
        remedy,
    )


def _joined(groups: list[list[str]]) -> list[list[str]]:
    """``groups`` of names; groups that share a name are joined."""
    joined: list[list[str]] = []
    for group in groups:
        touching = [other for other in joined if set(other) & set(group)]
        rest = [other for other in joined if other not in touching]
        joined = [*rest, list(dict.fromkeys([name for other in (*touching, group) for name in other]))]
    return joined
