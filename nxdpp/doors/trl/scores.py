"""Scores of labels in place of logits: a causal language model whose output layer computes TRL's per-token values.

::

    without labels      backbone ─ hidden (B, T, H) ─▶ output layer ─▶ logits (B, T, V)        as before
    with labels (B, T)  backbone ─ hidden (B, T, H) ─▶ output layer ─▶ scores (B, T - 1)       on the last stage

The values are those of TRL's own ``add_fused_lm_head``, which makes no whole logits. It runs inside the output layer:
a pipeline has the backbone and the layer on different ranks.
"""

from collections.abc import Sequence
from types import MethodType, SimpleNamespace
from typing import Any, cast

import torch
from peft import PeftModel
from peft.utils.other import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head

MASK = "label_mask"
_AUXILIARY = "aux_loss"


def causal_model(model: nn.Module) -> PreTrainedModel:
    """Return the model itself, inside of adapters."""
    return cast(PreTrainedModel, model.get_base_model() if isinstance(model, PeftModel) else model)


def return_scores(model: nn.Module, names: Sequence[str], with_routers: bool = False) -> None:
    """Let ``forward`` of ``model`` return a dict of scores when it gets ``labels``.

    ``names`` are the fields of ``FusedCausalLMOutput`` to compute; the dict has ``label_mask`` too, and with
    ``with_routers`` the auxiliary loss of the experts. Names of parameters stay. Raises ``ValueError`` for an output
    layer that is not an ``nn.Linear``.
    """
    causal = causal_model(model)
    head: Any = causal.get_output_embeddings()
    linears = [head] if type(head) is nn.Linear else _saved_linears(head)
    if not linears:
        raise ValueError(
            f"the output layer of {type(causal).__name__} is a {type(head).__name__}, and TRL's log-probabilities need "
            f"the weight of an nn.Linear. Use PipelineTrainer, with the loss in the model's forward."
        )
    fields = (*names, MASK, *([_AUXILIARY] if with_routers else []))
    for linear in linears:
        vars(linear)["forward"] = MethodType(_scoring_linear(causal.config, names, fields), linear)
    vars(causal)["forward"] = MethodType(_scoring_model(causal, fields), causal)


def scores_of(output: dict[str, Any]) -> Any:
    """Return the dict of a model's scores as TRL's code reads it."""
    return FusedCausalLMOutput(**output)


def _saved_linears(head: Any) -> list[nn.Linear]:
    if not isinstance(head, ModulesToSaveWrapper):
        return []
    copies = [head.original_module, *head.modules_to_save.values()]
    return copies if all(type(each) is nn.Linear for each in copies) else []


def _scoring_linear(config: Any, names: Sequence[str], fields: Sequence[str]) -> Any:
    def forward(
        self: nn.Linear,
        input: torch.Tensor,
        labels: torch.Tensor | None = None,
        router_logits: Any = None,
        attention_mask: torch.Tensor | None = None,
    ) -> Any:
        if labels is None:
            return nn.Linear.forward(self, input)
        lone = _OutputLayer(config, self, SimpleNamespace(last_hidden_state=input, router_logits=router_logits))
        add_fused_lm_head(lone, outputs=tuple(names))
        scores = lone.forward(
            labels=labels,
            fused_lm_head=True,
            output_router_logits=router_logits is not None,
            attention_mask=attention_mask,
        )
        return tuple(scores[name] for name in fields)

    return forward


def _scoring_model(model: PreTrainedModel, fields: Sequence[str]) -> Any:
    plain = model.forward
    asked = {"output_router_logits": True} if _AUXILIARY in fields else {}

    def forward(self: Any, *args: Any, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if labels is None:
            return plain(*args, **kwargs)
        hidden = self.base_model(*args, **{**kwargs, "use_cache": False, **asked})
        more = {"router_logits": hidden.router_logits, "attention_mask": kwargs.get("attention_mask")} if asked else {}
        scores = self.get_output_embeddings()(hidden.last_hidden_state, labels=labels, **more)
        return {name: scores[number] for number, name in enumerate(fields)}

    # The names of inputs are the model's own.
    forward.__wrapped__ = type(model).forward  # type: ignore[attr-defined]
    return forward


class _OutputLayer:
    """The part of a model that ``add_fused_lm_head`` calls, after the backbone has run."""

    def __init__(self, config: Any, layer: nn.Linear, backbone_output: Any) -> None:
        self.config = config
        self._layer = layer
        self._output = backbone_output

    def forward(self, **inputs: Any) -> Any:
        """Return nothing: ``add_fused_lm_head`` replaces it."""

    def base_model(self, **inputs: Any) -> Any:
        """Return what the backbone has returned."""
        return self._output

    def get_output_embeddings(self) -> nn.Linear:
        """Return the output layer."""
        return self._layer
