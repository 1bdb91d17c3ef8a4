"""Plan of a model: the style of each module and parameter that is divided."""

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

_ROWS = {"rowwise", "rowwise_split_input", "rowwise_rep", "rowwise_own_outputs"}
LINEAR = {"colwise", "colwise_gather_output", "colwise_rep", "packed_colwise"} | _ROWS
EMBEDDING = {"embedding_rowwise", "embedding_colwise", "embedding_heads"}
PARAMETER = {"colwise", "rowwise", "packed_colwise", "packed_rowwise", "replicate"}
_OF_TYPES = {"gaussian_topk", "mla_kv_a_proj", "moe_identity_expert", "moe_tp_experts"}
MODULE = {"all_reduce", "local_params", "replicate", "replicated_with_grad_allreduce", "rows"} | _OF_TYPES
STYLES = LINEAR | EMBEDDING | PARAMETER | MODULE


def check_plan(plan: Mapping[str, str]) -> None:
    """Raise ``TypeError`` for a malformed plan, and ``ValueError`` for unknown styles."""
    if not isinstance(plan, Mapping) or not all(isinstance(each, str) for pair in plan.items() for each in pair):
        raise TypeError(
            f'plan must be a dict of name patterns and styles, such as {{"model.layers.*.mlp.up_proj": "colwise"}}, '
            f"not {plan!r:.80}"
        )
    unknown = sorted({style for style in plan.values() if style not in STYLES})
    if unknown:
        known = ", ".join(sorted(STYLES))
        raise ValueError(f"unknown styles in the plan: {', '.join(unknown)}. The styles are {known}")


def expanded(plan: Mapping[str, str], model: nn.Module) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Styles of the modules and of the parameters of ``model`` by name, and the patterns that match neither."""
    generic = {_without_numbers(pattern): style for pattern, style in plan.items()}
    found: set[str] = set()

    def of(names: Any) -> dict[str, str]:
        styles = {}
        for name, _ in names:
            for key in (name, _without_numbers(name)):
                if key in plan or key in generic:
                    found.add(key)
                    styles[name] = plan.get(key) or generic[key]
                    break
        return styles

    modules = of(model.named_modules(remove_duplicate=False))
    parameters = of(model.named_parameters(remove_duplicate=False))
    return modules, parameters, [name for name in plan if name not in found and _without_numbers(name) not in found]


def _without_numbers(name: str) -> str:
    """``layers.3.mlp`` as ``layers.*.mlp``, as in the plans of transformers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
