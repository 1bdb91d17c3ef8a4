"""The plan that ``tensor_parallelize`` takes for a model by default, and rules that plans of transformers lack.

Names are the base model's. Heads have their own names in the whole model.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from nxdpp.ground.transformers_names import TP_PLAN
from nxdpp.tensor.models.adapters import adapted_plan, base_of
from nxdpp.tensor.models.compared_types import COMPARED, is_compared
from nxdpp.tensor.models.plan import expanded
from nxdpp.tensor.models.type_plans import PLANS


class Rule(NamedTuple):
    """Rule of modules or parameters that the plan of a type lacks, or has with a different style.

    ``beside`` is the rule of the plan that needs this one, ``reason`` is for messages.
    """

    name: str
    style: str
    beside: str
    reason: str


_SUMMED = "replicated_with_grad_allreduce"
_FEATURES = "its parameters see the features of one rank"
_MASK = "the mask of a head depends on the values of all heads"
_NORM = "it sees the heads of one rank"
_TOPK = "its activation takes mean and deviation of all features"
_BLOCKS = "gate and up are blocks of one tensor"
_EXPERTS = "layers.*.mlp.experts.gate_up_proj"
ADDED: dict[str, tuple[Rule, ...]] = {
    "apertus": (Rule("layers.*.mlp.act_fn", _SUMMED, "layers.*.mlp.up_proj", _FEATURES),),
    "doge": (
        Rule("layers.*.self_attn.dt_proj", "rowwise_own_outputs", "layers.*.self_attn.v_proj", _MASK),
        Rule("layers.*.self_attn.A", "colwise", "layers.*.self_attn.v_proj", "it has one number for each head"),
        Rule("layers.*.self_attn.q_norm", _SUMMED, "layers.*.self_attn.q_proj", _NORM),
        Rule("layers.*.self_attn.k_norm", _SUMMED, "layers.*.self_attn.k_proj", _NORM),
    ),
    "gemma3n_text": (Rule("layers.*.mlp", "gaussian_topk", "layers.*.mlp.gate_proj", _TOPK),),
    "inkling_text": (Rule(_EXPERTS, "packed_colwise", _EXPERTS, _BLOCKS),),
    "inkling2_text": (Rule(_EXPERTS, "packed_colwise", _EXPERTS, _BLOCKS),),
}
"""Rules added to the plan of a type, or in place of one of its rules."""

COUNTS_OF_HEADS: dict[str, tuple[str, ...]] = {
    "GPT2Attention": ("split_size",),
    "GPTJAttention": ("num_attention_heads",),
    "GPTJFlashAttention2": ("num_attention_heads",),
    "GPTNeoFlashAttention2": ("num_heads",),
    "GPTNeoSelfAttention": ("num_heads",),
    "T5Attention": ("n_heads", "inner_dim"),
}
"""Attributes of an attention module that its code takes for the size of its own heads."""


def plan_of_transformers(model: Any) -> Mapping[str, str]:
    """The plan that transformers has for ``model``; empty without one."""
    return (TP_PLAN.of(model) if TP_PLAN.held_by(model) else None) or {}


def plan_of(model: Any) -> dict[str, str]:
    """The plan of ``model`` with the names in ``model``: of transformers, or ours; empty if there is none."""
    model_type, prefix = _type_and_prefix(model)
    if model_type in PLANS:
        return {f"{prefix}{name}": style for name, style in PLANS[model_type].items()}
    plan = dict(plan_of_transformers(model))
    return plan | {f"{prefix}{rule.name}": rule.style for rule in ADDED.get(model_type, ()) if plan}


def check_added(model: Any, plan: Mapping[str, str]) -> None:
    """Raise ``ValueError`` for a plan of the user that lacks a rule which the modules of the type need."""
    model_type, prefix = _type_and_prefix(model)
    for rule in ADDED.get(model_type, ()):
        name, beside = f"{prefix}{rule.name}", f"{prefix}{rule.beside}"
        if beside in plan and plan.get(name) != rule.style:
            raise ValueError(
                f"the plan of {type(model).__name__} divides {beside}. It must have {name!r}: {rule.style!r}, because "
                f"{rule.reason}"
            )


def _type_and_prefix(model: Any) -> tuple[str, str]:
    base = getattr(model, "base_model", model)
    model_type: str = getattr(getattr(model, "config", None), "model_type", "")
    return model_type, "" if base is model else f"{model.base_model_prefix}."


def tensor_plan(model: nn.Module) -> dict[str, str] | None:
    """Return the style of each module by name pattern that ``tensor_parallelize`` takes for ``model`` by default.

    It has only patterns of parts that ``model`` has. ``None`` for a model that ``tensor_parallelize`` refuses without
    ``plan=``. Needs no ranks, and does not look at sizes.
    """
    base = base_of(model)
    plan = plan_of(base)
    if not plan:
        return None
    if base is not model:
        plan = adapted_plan(model, plan)
    if not has_compared_plan(model, plan):
        return None
    _, _, unmatched = expanded(plan, model)
    return {pattern: style for pattern, style in plan.items() if pattern not in unmatched}


def has_compared_plan(model: nn.Module, plan: Mapping[str, str]) -> bool:
    """Return whether ``plan``, the default of ``model``, was compared with one process."""
    base = base_of(model)
    model_type = getattr(getattr(base, "config", None), "model_type", None)
    has_own_plan = model_type in PLANS and base is model
    return has_own_plan or type(base).__name__ in COMPARED or is_compared(type(model), plan)
