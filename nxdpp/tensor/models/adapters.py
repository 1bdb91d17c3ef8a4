"""Plan of a model that PEFT has adapted: its low-rank matrices are divided as the layers next to them.

::

    colwise   q_proj.base_layer  rows divided       lora_A  whole              lora_B  rows divided
    rowwise   o_proj.base_layer  columns divided    lora_A  columns divided    lora_B  whole
"""

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from nxdpp.tensor.models.plan import expanded

_DIVIDED = {"colwise": "lora_B", "colwise_gather_output": "lora_B", "colwise_rep": "lora_B", "rowwise": "lora_A"}


def base_of(model: nn.Module) -> nn.Module:
    """The model under the adapters of a ``PeftModel``; any other ``model`` itself. PEFT is not imported for that."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return model
    base: nn.Module = model.get_base_model()
    return base


def adapted_plan(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return ``plan`` of the base model of ``model``, with the names in ``model`` and rules for the adapters.

    Raises ``ValueError`` for adapters other than low-rank matrices of linear layers, where the plan divides a layer.
    """
    base = base_of(model)
    prefix = next(name for name, child in model.named_modules() if child is base)
    modules, parameters, _ = expanded(plan, base)
    names: dict[str, str] = {}
    for name, style in modules.items():
        module: Any = base.get_submodule(name)
        if not _is_adapted(module):
            names[name] = style
            continue
        if not _is_low_rank(module) or style not in _DIVIDED:
            raise ValueError(
                f"{name}, which the plan divides ({style}), has an adapter of {type(module).__module__}. Adapters of "
                f"divided layers must be LoRA of linear layers, without DoRA: merge it (merge_and_unload()), or leave "
                f"the layer out of target_modules, target_parameters and modules_to_save"
            )
        names[f"{name}.base_layer"] = style
        names |= {f"{name}.{_DIVIDED[style]}.{adapter}": style for adapter in module.lora_A}
    for name, style in parameters.items():
        if _is_adapted(base.get_submodule(name.rpartition(".")[0])):
            raise ValueError(f"{name}, which the plan divides, has an adapter: merge it (merge_and_unload())")
        names[name] = style
    return {f"{prefix}.{name}": style for name, style in names.items()}


def _is_adapted(module: nn.Module) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)


def _is_low_rank(module: Any) -> bool:
    from peft.tuners.lora import Linear

    # DoRA and other variants take the norm of the whole weight.
    return type(module) is Linear and not getattr(module, "lora_variant", None)
