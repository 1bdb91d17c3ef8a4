"""Context parallelism for an unmodified model of transformers."""

from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

from nxdpp.context.attention import divide_attention
from nxdpp.context.layer import LayerOfTokens
from nxdpp.context.loss import LOSSES
from nxdpp.ranks import parallel_state
from nxdpp.tensor.models.loss import calls_loss_function
from nxdpp.tensor.models.modules import override
from nxdpp.tracing.modules.layers import find_layer_classes, layer_names

M = TypeVar("M", bound=nn.Module)


def context_parallelize(model: M, transformer_layer_cls: Any | None = None) -> M:
    """Divide the tokens of each sequence over the ranks of the context group, in place; not collective.

    Call it after ``initialize_model_parallel(context_parallel_size=...)`` and before ``NxDPPModel``, with the same
    model on all ranks. Each layer, the head and the loss then run on this rank's tokens. In attention each rank has all
    tokens for some of the heads. All ranks of a context group are given the same inputs, whole: positions, masks,
    packed sequences and shifted labels are made for the whole sequence, and cut afterwards. Losses and gradients are
    those of one process, to rounding.

    Args:
        model: a causal language model of transformers, not wrapped yet.
        transformer_layer_cls: its layers, as for ``NxDPPModel``.

    Returns:
        ``model`` itself; unchanged with ``context_parallel_size=1``.

    Raises:
        TypeError: for a model that is wrapped already, or not of transformers.
        ValueError: for a model that is divided already, layers in several lists, and another loss than that of causal
            language models. Nothing is changed then.
        RuntimeError: before ``initialize_model_parallel``.

    After Jacobs et al., "DeepSpeed Ulysses" (arXiv 2309.14509).
    """
    if hasattr(model, "replace_local_tensors"):
        raise TypeError(
            f"context_parallelize takes a model before it is wrapped, not a {type(model).__name__}: "
            f"NxDPPModel(context_parallelize(model), ...)"
        )
    models = [each for each in model.modules() if isinstance(each, PreTrainedModel)]
    if not models:
        raise TypeError(f"context_parallelize takes models of transformers, not a {type(model).__name__}")
    ranks = parallel_state.get_context_model_parallel_size()
    names = layer_names(model, find_layer_classes(model, transformer_layer_cls))
    layers = [model.get_submodule(name) for name in names]
    if any(isinstance(layer, LayerOfTokens) for layer in layers):
        raise ValueError("the sequences of the model are divided already: call context_parallelize once")
    lists = sorted({name.rpartition(".")[0] for name in names})
    if len(lists) > 1:
        raise ValueError(
            f"{type(model).__name__} has layers in {', '.join(lists)}, and one list of causal layers is divided: train "
            f"it without context_parallelize"
        )
    if any(getattr(each.config, "output_router_logits", False) for each in models):
        raise ValueError(
            f"{type(model).__name__} has output_router_logits=True, and the auxiliary loss of routers would be one of "
            f"each rank's tokens: set config.output_router_logits=False, or train it without context_parallelize"
        )
    loss: Any = getattr(model, "loss_function", None)
    if loss not in LOSSES or not calls_loss_function(type(model).forward):
        raise ValueError(
            f"{type(model).__name__} does not compute its loss by self.loss_function as causal language models of "
            f"transformers do, and its labels would not be cut: train it without context_parallelize"
        )
    if ranks == 1:
        return model
    divide_attention()
    for layer in layers:
        override(layer, LayerOfTokens)
    vars(layers[0])["takes_whole"] = True
    # A property of transformers' models, that sets.
    setattr(model, "loss_function", LOSSES[loss])  # noqa: B010  # the type of model is any module's
    return model
