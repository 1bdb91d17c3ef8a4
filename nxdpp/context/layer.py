"""Layers that are given, and hand on, this rank's tokens of each sequence."""

import inspect
import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from nxdpp.context.cut import cut_sequence, places_of
from nxdpp.context.mixer import WholeSequences
from nxdpp.context.participant import Context
from nxdpp.context.sequence import DIMENSION, sequences
from nxdpp.ground.torch_names import pytree
from nxdpp.ranks import parallel_state
from nxdpp.tensor.collectives import has_values
from nxdpp.tensor.models.modules import override

_logger = logging.getLogger(__name__)
_WHOLE = "mask"
"""Word in the names of arguments that attention takes for the whole sequence."""
_OF_ONE_TOKEN = ("mlp", "norm", "ffn", "feed_forward", "moe", "expert", "drop", "fc", "router", "gate", "ln", "dense")
"""Words in the names of modules that compute each token for itself."""
# Sums of a router or of experts may be in another order.
_ROUNDINGS = 64


class LayerOfTokens(nn.Module):
    """Layer of a part of each sequence, put before the methods of its own class.

    Its first argument are hidden states ``(B, tokens, ...)``: this rank's tokens, or all of them for the first layer of
    a model. Other tensors with a value for each token of the whole sequence are cut, masks stay whole.
    """

    participant_of_steps = Context
    divides_sequences = True
    takes_whole = False
    is_probed = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on this rank's tokens; collective over the context group.

        Raises ``ValueError`` in the first call for a layer that mixes tokens by other means than attention, and not in
        a module of its own.
        """
        own = super().forward
        name = _own_class(self).__name__
        given = {**dict(zip(_names(_own_class(self).forward), args, strict=False)), **kwargs}
        first, hidden = next(iter(given.items()))
        length = hidden.shape[1] if self.takes_whole else _length(given, name)
        tokens = len(places_of(length, parallel_state.get_context_model_parallel_size())[_rank()])
        if not self.takes_whole and hidden.shape[1] != tokens:
            raise ValueError(
                f"{name} is given hidden states {list(hidden.shape)}, and this rank has {tokens} of {length} tokens: "
                f"layers over context ranks follow each other, from the first one on"
            )
        wholes: dict[int, torch.Tensor] = {}
        cut = [
            value if _WHOLE in key else _own(value, length, wholes, dim=1 if key == first else None)
            for key, value in given.items()
        ]

        def run(*given: Any) -> Any:
            return own(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))

        with sequences.set(length=length, wholes=wholes, calls=0):
            # A model may be run on fake tensors, with real inputs.
            if not self.is_probed and has_values(hidden.new_empty(0)):
                self._probe(run, cut, tokens)
            return run(*cut)

    def _probe(self, run: Callable[..., Any], given: list[Any], tokens: int) -> None:
        """Give whole sequences to modules of the layer that mix tokens, if it has some.

        Raises ``ValueError`` if they are mixed elsewhere.
        """
        reason = self._mixes(run, given, tokens)
        if reason is not None:
            found = [(name, each) for name, each in self.named_children() if _may_mix(name, each)]
            for _, each in found:
                override(each, WholeSequences)
            mixed = self._mixes(run, given, tokens) if found else reason
            if mixed is not None:
                raise ValueError(
                    f"{_own_class(self).__name__} mixes the tokens of a sequence by other means than attention: "
                    f"{reason}. Over context ranks its tokens would not see those of other ranks: train it without "
                    f"context_parallelize"
                )
            _tell_of_whole(_own_class(self).__name__, tuple(name for name, _ in found))
        vars(self)["is_probed"] = True

    def _mixes(self, run: Callable[..., Any], given: list[Any], tokens: int) -> str | None:
        """Return why outputs of a token depend on others; ``None`` if they do by attention alone.

        Attention gives each token its own value meanwhile, so tokens in reverse order have the same outputs.
        """
        modes = {module: module.training for module in self.modules()}
        reverse = partial(_reversed, tokens=tokens)
        try:
            self.eval()
            with torch.no_grad(), sequences.set(is_probed=True, calls=0):
                there = _first(run(*given))
                back = _first(run(*pytree.tree_map(reverse, given)))
                calls = sequences.calls
        except Exception as error:
            return f"it fails on a part of a sequence ({type(error).__name__}: {error})"
        finally:
            for module, mode in modes.items():
                module.training = mode
        if not calls:
            return "it calls no attention of transformers' AttentionInterface"
        if there.shape[1] != tokens:
            return f"it returns {list(there.shape)} for {tokens} tokens"
        found, greatest = (there - back.flip(1)).abs().max(), there.abs().max()
        if not found <= _ROUNDINGS * torch.finfo(there.dtype).eps * greatest:
            return "its outputs depend on the order of tokens, without attention"
        return None


def _may_mix(name: str, module: nn.Module) -> bool:
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    return not is_list and not any(word in name for word in _OF_ONE_TOKEN)


@cache
def _tell_of_whole(layer: str, names: tuple[str, ...]) -> None:
    if parallel_state.get_context_model_parallel_rank() == 0:
        _logger.warning(
            "%s mixes tokens by other means than attention, so each context rank gives its %s whole sequences: their "
            "work and activations are not divided",
            layer,
            " and ".join(names),
        )


def _own(value: Any, length: int, wholes: dict[int, torch.Tensor], dim: int | None = None) -> Any:
    """Return this rank's tokens of the tensors in ``value``, which lie along ``dim``, and note them in ``wholes``."""

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        along = DIMENSION.get(leaf.dim()) if dim is None else dim
        if along is None or leaf.shape[along] != length:
            return leaf
        part = cut_sequence(leaf, along)
        if not leaf.requires_grad:
            wholes[id(part)] = leaf
        return part

    return pytree.tree_map(own, value)


def _reversed(leaf: Any, tokens: int) -> Any:
    if not isinstance(leaf, torch.Tensor) or (dim := DIMENSION.get(leaf.dim())) is None:
        return leaf
    return leaf.flip(dim) if leaf.shape[dim] == tokens else leaf


def _first(output: Any) -> torch.Tensor:
    return next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))


def _length(given: dict[str, Any], layer: str) -> int:
    """Return the length of the whole sequence, of the step or of arguments that are whole."""
    if (length := Context.length()) is not None:
        return length
    for name, value in given.items():
        if "position" in name:
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, torch.Tensor) and leaf.dim() in DIMENSION:
                    return leaf.shape[DIMENSION[leaf.dim()]]
    raise ValueError(f"{layer} was called outside of a step, and no argument tells the length of its sequences")


def _own_class(layer: nn.Module) -> type[nn.Module]:
    return type(layer).__mro__[2]


@cache
def _names(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


def _rank() -> int:
    return parallel_state.get_context_model_parallel_rank()
