"""Names in a model that PEFT has adapted, in the adapter's file, and in the base model's files.

::

    base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight        in the module
                     model.layers.0.self_attn.q_proj.weight                   in a file of the base model

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight    in the module
    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight            in the adapter's file
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nxdpp.checkpoint.huggingface.model_tensors import tensors_of, unwrapped_name
from nxdpp.pipeline.local.own_save import naming

PROMPTS = "prompt_encoder."


def is_adapted(module: nn.Module) -> bool:
    """Return whether ``module`` is a ``PeftModel``. PEFT is not imported for that."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.PeftModel)


def adapter_names(module: Any, adapter: str) -> dict[str, str]:
    """Names of the tensors in the file of ``adapter``, with their names in ``module``; not for learned prompts.

    PEFT may ask the Hugging Face hub whether the vocabulary was extended. Raises ``NotImplementedError`` for an adapter
    whose file has tensors that are made from other tensors.
    """
    from peft import get_peft_model_state_dict

    state = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors_of(module).items()}
    names = {id(tensor): name for name, tensor in state.items()}
    with naming():
        selected = get_peft_model_state_dict(module, state_dict=state, adapter_name=adapter)
    made = [name for name, tensor in selected.items() if id(tensor) not in names]
    if made:
        kind = module.peft_config[adapter].peft_type
        raise NotImplementedError(
            f"PEFT makes {made[0]} of other tensors when it saves this adapter ({kind}), which is not implemented over "
            f"several stages: save local_state_dict() on each rank."
        )
    return {saved: names[id(tensor)] for saved, tensor in selected.items()}


def learns_prompts(module: Any, adapter: str) -> bool:
    """Return whether ``adapter`` is one of learned prompts, whose file has the output of an encoder."""
    return bool(module.peft_config[adapter].is_prompt_learning)


def base_names(module: Any) -> Iterator[tuple[str, str]]:
    """The name in the base model, and the name in ``module``, of each tensor of the base model.

    A module that is trained next to the adapter (``modules_to_save``) has the original and copies: the name in the base
    model comes once for each, the original first.
    """
    base = module.get_base_model()
    prefix = next(name for name, child in module.named_modules() if child is base)
    yield from _names(base, "", prefix)


def _names(module: nn.Module, name: str, full: str) -> Iterator[tuple[str, str]]:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if isinstance(module, BaseTunerLayer):
        yield from _names(module.get_submodule("base_layer"), name, f"{full}.base_layer")
        return
    if isinstance(module, AuxiliaryTrainingWrapper):
        yield from _names(module.original_module, name, f"{full}.original_module")
        for adapter, copy in dict(getattr(module, "modules_to_save", {}).items()).items():
            yield from _names(copy, name, f"{full}.modules_to_save.{adapter}")
        return
    buffers = [key for key in module._buffers if key not in module._non_persistent_buffers_set]
    for key in (*module._parameters, *buffers):
        if module._parameters.get(key, module._buffers.get(key)) is not None:
            yield unwrapped_name(f"{name}.{key}" if name else key), unwrapped_name(f"{full}.{key}")
    for key, child in module._modules.items():
        if child is not None:
            yield from _names(child, f"{name}.{key}" if name else key, f"{full}.{key}")
