"""Experts modules of a model whose experts are divided: they send the tokens of their rank (``tokens.py``)."""

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from nxdpp.experts.interface import other_implementation
from nxdpp.experts.participant import Experts
from nxdpp.experts.routing import routing_of
from nxdpp.experts.tokens import LocalExperts, counted_tokens, dispatched
from nxdpp.ranks import parallel_state
from nxdpp.tensor.collectives import has_values
from nxdpp.tensor.tensor_attributes import KeepsAttributes


class DividedExperts(KeepsAttributes):
    """Experts module that has this rank's experts, and is called with the tokens of this rank.

    Its class has a ``forward`` of hidden states ``(N, H)``, the chosen experts ``(N, K)`` and their weights ``(N, K)``,
    in this order or with the last two exchanged, as transformers' experts have. It returns ``(N, H)``: for each token
    the outputs of its experts, weighted and added up.

    Attributes:
        own_experts: number of this rank's experts.
    """

    participant_of_steps = Experts
    own_experts: int

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the outputs ``(N, H)`` of tokens of this rank; collective over the expert group.

        Raises ``ValueError`` for other arguments than those of the class.
        """
        own: LocalExperts = super().forward
        given = list(inspect.signature(own).bind(*args, **kwargs).arguments.values()) if kwargs else list(args)
        hidden, weights, place = _checked(given, type(self).__name__)
        index = given[place]
        rows = hidden.reshape(-1, hidden.shape[-1])

        run = partial(self.run_own, place)
        count = self.own_experts
        choices, routing = index.reshape(len(rows), index.shape[-1]), routing_of(self)
        weights = weights.reshape(choices.shape)
        if not has_values(hidden):
            return counted_tokens(run, count, rows, choices, weights).view_as(hidden)
        call = None if routing is None else routing.choose(self, choices)
        if (other := other_implementation(self, place, count)) is not None:
            brought: torch.Tensor = other(rows, choices, weights)
            return brought.view_as(hidden)
        asked = run, count, rows, choices, weights, parallel_state.get_expert_model_parallel_group()
        if routing is None or call is None:
            return dispatched(*asked)[0].view_as(hidden)
        outputs, tokens = dispatched(*asked, routing.number_of(self), routing.text_of)
        routing.note(self, call, tokens)
        return outputs.view_as(hidden)

    def run_own(self, place: int, tokens: torch.Tensor, local: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the outputs of ``tokens`` by this rank's experts; ``place`` is that of the experts as arguments."""
        own: LocalExperts = super().forward
        return own(tokens, local, weights) if place == 1 else own(tokens, weights, local)


def _checked(given: Sequence[Any], name: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return hidden states, weights, and the place of the chosen experts among ``given``."""
    tensors = len(given) == 3 and all(isinstance(each, torch.Tensor) for each in given)
    whole = [place for place in (1, 2) if tensors and not given[place].is_floating_point()]
    fits = len(whole) == 1 and given[1].shape == given[2].shape and given[1].dim()
    if not fits or given[1].numel() != given[0][..., 0].numel() * given[1].shape[-1]:
        shown = ", ".join(
            f"{each.dtype} {list(each.shape)}" if isinstance(each, torch.Tensor) else type(each).__name__
            for each in given
        )
        raise ValueError(
            f"{name} is called with {shown}. Experts over ranks take hidden states (N, H), the chosen experts (N, K) "
            f"and their weights (N, K): train it without expert_parallelize, or name another module in its plan."
        )
    return given[0], given[3 - whole[0]], whole[0]
