"""Routing of the layers of experts of a model: how many tokens come in a step, and which experts each token chooses.

The action that runs (``board.action``) tells the microbatch. So a layer that is computed again in a backward notes the
same numbers, and gets the same choices, as in its forward: under any schedule, split backward and recomputation.

Choices that are given again take the place of the router's own, in ``torch.topk``::

    scores (N, E) ── topk ─▶ values (N, K), experts (N, K)          the router chooses
    scores (N, E) ── gather at the given experts ─▶ values (N, K)   the choices are given

So weights are those of the present router, with their gradients. After Ma et al., "Stabilizing MoE Reinforcement
Learning by Aligning Training and Inference Routers" (arXiv 2510.11370).
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from nxdpp.counted import counted
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults.board import NO_ACTION, board

Routing = list[dict[str, dict[int, torch.Tensor]]]
"""For each step, by the name of each layer of experts and by microbatch, the chosen experts ``(N, K)``."""

_TOPK = (torch.topk, torch.Tensor.topk)


def routing_of(layer: nn.Module) -> "StepRouting | None":
    """Return the routing of the step that ``layer`` runs in; ``None`` outside of steps."""
    routing = None if board.action == NO_ACTION else StepRouting.present()
    return routing if routing is not None and layer in routing.names else None


class StepRouting:
    """The layers of experts of one wrapped model on this rank, step after step.

    Attributes:
        present: gives the routing of the last step in which a model with layers of experts took part.
        names: of the layers.
        record: gets the choices of each step; ``None`` outside of ``recorded_routing``.
        replay: has the choices of the steps that follow; ``None`` outside of ``replayed_routing``.
    """

    present: ClassVar[Callable[[], "StepRouting | None"]] = staticmethod(lambda: None)

    def __init__(self) -> None:
        self.names: dict[nn.Module, str] = {}
        self.record: Routing | None = None
        self.replay: Routing | None = None
        self._microbatches: Sequence[int] = ()
        self._given: dict[str, dict[int, torch.Tensor]] = {}
        self._trains = False
        # By layer: the action of its last call with the number of calls in it; tokens by microbatch and call.
        self._calls: dict[nn.Module, tuple[int, int]] = {}
        self._tokens: dict[nn.Module, dict[tuple[int, int], list[int]]] = {}

    def follow(self, names: dict[nn.Module, str]) -> None:
        """Follow the layers of these ``names``."""
        self.names = names
        self._tokens = {layer: calls for layer, calls in self._tokens.items() if layer in names}

    def check(self, microbatches: int) -> None:
        """Raise ``ValueError`` before a step for which no choices are given."""
        if self.replay is None:
            return
        if not self.replay:
            raise ValueError("replayed_routing has given the choices of all its steps: record as many as follow")
        wanted = set(range(microbatches))
        for name in self.names.values():
            if (found := set(self.replay[0].get(name, ()))) != wanted:
                raise ValueError(
                    f"replayed_routing has the microbatches {sorted(found)} of {name}, the step has {microbatches}: "
                    f"record a step with as many, over the same stages"
                )

    def begin(self, microbatches: Sequence[int], train: bool) -> None:
        """Begin a step, with the microbatch of each action."""
        # Weak: a model may be dropped after its last step.
        StepRouting.present = ref(self)
        self._microbatches, self._trains = microbatches, train
        self._calls.clear()
        if train:
            self._tokens.clear()
        if self.record is not None:
            self.record.append({})
        self._given = {} if self.replay is None else self.replay.pop(0)

    def number_of(self, layer: nn.Module) -> int:
        """Return a number of ``layer`` in the present action, which all ranks of an expert group have alike."""
        return board.action * len(self.names) + list(self.names).index(layer)

    def text_of(self, number: int) -> str:
        """Return the text of the layer and microbatch of a ``number``."""
        action, index = divmod(number, len(self.names))
        return f"{list(self.names.values())[index]}, microbatch {self._microbatches[action]} (action {action})"

    def given(self, layer: nn.Module) -> torch.Tensor | None:
        """Return the choices ``(N, K)`` that are given to ``layer`` in the present microbatch, if any are."""
        name = self.names.get(layer)
        return self._given[name][self._microbatches[board.action]] if name in self._given else None

    def choose(self, layer: nn.Module, choices: torch.Tensor) -> tuple[int, int]:
        """Note the ``choices`` ``(N, K)`` of a call of ``layer``; return its microbatch and its number in the action.

        Raises ``RuntimeError`` for other choices than the given ones.
        """
        at, (before, number) = board.action, self._calls.get(layer, (NO_ACTION, 0))
        number = number + 1 if before == at else 0
        self._calls[layer] = at, number
        microbatch, given = self._microbatches[at], self.given(layer)
        if number and (given is not None or self.record is not None):
            raise RuntimeError(
                f"{self.names[layer]} is called twice in microbatch {microbatch}: the routing of a layer can be "
                f"recorded and replayed that runs once in a forward"
            )
        if given is not None and not torch.equal(choices, given.to(choices)):
            raise RuntimeError(
                f"{self.names[layer]} has not got the experts that replayed_routing gives. They take the place of the "
                f"result of torch.topk(scores, {given.shape[-1]}) in the forward of the module that has the experts: "
                f"choose by it there"
            )
        if self.record is not None:
            self.record[-1].setdefault(self.names[layer], {})[microbatch] = choices.detach()
        return microbatch, number

    def note(self, layer: nn.Module, call: tuple[int, int], tokens: list[int]) -> None:
        """Note the tokens that came to each expert of this rank, and last the tokens of the whole expert group."""
        if self._trains:
            self._tokens.setdefault(layer, {})[call] = tokens

    def balance(self) -> dict[str, Any]:
        """Return the balance of the last training step, for JSON; empty without layers of experts; not collective.

        A token counts once for each expert that it chooses. Keys: ``experts``, the tokens of each expert, summed over
        the layers of this rank, with 0 for experts of other ranks; ``routing``, with ``largest_over_mean``, the most
        tokens of an expert of this rank over the mean of all experts of its layer, ``largest``, the text of that layer
        and expert, and ``share``, the part of all tokens that came to this rank.
        """
        rank, ranks = parallel_state.get_expert_model_parallel_rank(), parallel_state.get_expert_model_parallel_size()
        experts: list[int] | None = None
        most, largest, here, everywhere = -1.0, "", 0, 0
        for layer, calls in self._tokens.items():
            *own, total = map(sum, zip(*calls.values(), strict=True))
            count, here, everywhere = len(own), here + sum(own), everywhere + total
            if (over := max(own) * ranks * count / max(1, total)) > most:
                most, largest = over, f"{self.names[layer]}, expert {rank * count + own.index(max(own))}"
            placed = [0] * (rank * count) + own + [0] * ((ranks - 1 - rank) * count)
            experts = placed if experts is None else [a + b for a, b in zip(experts, placed, strict=False)]
        if experts is None:
            return {}
        told = {"largest_over_mean": round(most, 4), "largest": largest, "share": round(here / max(1, everywhere), 4)}
        return {"experts": experts, "routing": told}


def with_given(forward: Callable[..., Any], layer: nn.Module, routing: StepRouting, experts: int) -> Callable[..., Any]:
    """Return ``forward``, of the module that has ``layer``, in which the given choices take the place of a ``topk``.

    ``experts`` is the number of all experts of the layer.
    """

    def replayed(*args: Any, **kwargs: Any) -> Any:
        given = None if routing_of(layer) is not routing else routing.given(layer)
        if given is None:
            return forward(*args, **kwargs)
        with _Given(given, experts, routing.names[layer]):
            return forward(*args, **kwargs)

    return replayed


class _Given(TorchFunctionMode):
    """Makes ``torch.topk`` over ``experts`` scores return ``choices`` ``(N, K)``, with the scores of these."""

    def __init__(self, choices: torch.Tensor, experts: int, name: str) -> None:
        super().__init__()
        self._choices, self._experts, self._name = choices, experts, name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self._chosen(*args, **kwargs) if func in _TOPK else func(*args, **kwargs)

    def _chosen(self, input: torch.Tensor, k: int, dim: int = -1, **others: Any) -> Any:
        if dim % input.dim() != input.dim() - 1 or (input.shape[-1], k) != (self._experts, self._choices.shape[-1]):
            return torch.topk(input, k, dim, **others)
        rows = input[..., 0].numel()
        if rows != len(self._choices):
            raise ValueError(
                f"replayed_routing has the choices of {counted(len(self._choices), 'token')} of {self._name}, and the "
                f"microbatch has {rows}: give it the batches of the recorded steps"
            )
        choices = self._choices.to(input.device).view(*input.shape[:-1], k)
        return torch.return_types.topk((input.gather(-1, choices), choices))
