"""Tiny models of each architecture, traced as the runtime does."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from transformers import BertConfig, BertForSequenceClassification, PreTrainedModel

from nxdpp.tracing.graph.trace import TracedGraph, TracingOptions, trace_for
from nxdpp.tracing.modules.layers import find_layer_classes, resolve_classes
from tests.support import models

ARCHITECTURES = ("llama", "gpt2", "qwen3", "mixtral", "bert", "bert_classifier")
CLASSES = 3


def make_model(architecture: str, **changes: Any) -> PreTrainedModel:
    """A model with the same weights each time, in evaluation mode."""
    model: Any
    if architecture == "bert_classifier":
        torch.manual_seed(1234)
        sizes = {"vocab_size": models.VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
        model = BertForSequenceClassification(
            BertConfig(**{**sizes, "num_attention_heads": 4, "num_labels": CLASSES, **changes})
        )
    else:
        model = models.make(architecture, **changes)
    model.eval()
    assert isinstance(model, PreTrainedModel)
    return model


def make_inputs(architecture: str) -> dict[str, torch.Tensor]:
    """A batch of two with a padding mask, and labels."""
    inputs = models.padded_batch(2)
    if architecture == "bert_classifier":
        inputs["labels"] = torch.tensor([2, 0])
    return inputs


def options_for(
    module: nn.Module, layer_class: Any = None, leaves: tuple[Any, ...] = (), **options: Any
) -> TracingOptions:
    """The options that ``NxDPPModel`` would make."""
    return TracingOptions(
        layer_classes=find_layer_classes(module, layer_class),
        leaf_classes=resolve_classes(module, leaves, "leaf_module_cls"),
        **options,
    )


def trace_with(module: nn.Module, inputs: Mapping[str, Any], options: TracingOptions | None = None) -> TracedGraph:
    """``trace_for`` with the options of ``module`` by default."""
    return trace_for(module, inputs, options or options_for(module))


def run_graph(module: nn.Module, traced: TracedGraph, inputs: Mapping[str, Any]) -> Any:
    """Output of the whole graph, run over the original modules."""
    values = fx.GraphModule(module, traced.graph)(**{name: inputs[name] for name in traced.inputs})
    return pytree.tree_unflatten(values, traced.output_spec)


class PlainLayer(nn.Module):
    """A layer of a model that is not from Hugging Face."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class PlainModel(nn.Module):
    """Four layers between an embedding and a head; a subclass may change the first hidden states."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(4, 4)
        self.layers = nn.ModuleList(PlainLayer() for _ in range(4))
        self.head = nn.Linear(4, 1)

    def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.prepare(self.embedding(x))
        for layer in self.layers:
            hidden = layer(hidden)
        result: torch.Tensor = self.head(hidden).mean()
        return result


class PreparedModel(PlainModel):
    """A model with a function in front of its layers."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.__dict__["function"] = function

    def prepare(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.__dict__["function"](hidden)
        return result


class Asserts(PlainModel):
    """Asserts positive inputs and finite hidden states. It is not in a test file: pytest rewrites assertions there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert torch.all(x > 0).item(), "x must be positive"
        hidden = self.embedding(x)
        for layer in self.layers:
            hidden = layer(hidden)
        assert hidden.isfinite().all()
        result: torch.Tensor = self.head(hidden).mean()
        return result


def scaled_by_modes(hidden: torch.Tensor) -> torch.Tensor:
    """``hidden`` times a number that tells the modes of torch around the call."""
    if torch.is_grad_enabled():
        hidden = hidden * 3
    if torch.is_autocast_enabled("cpu"):
        hidden = hidden * 5
    if hidden.requires_grad:
        hidden = hidden * 7
    if (hidden @ hidden.mT).dtype == torch.bfloat16:
        hidden = hidden * 11
    return hidden
