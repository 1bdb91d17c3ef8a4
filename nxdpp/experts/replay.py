"""Recording and replaying the routing of experts over ranks, as reinforcement learning needs it.

A rollout, or an evaluation of old probabilities, and the training step after it then use the same experts::

    with nxdpp.recorded_routing(model) as routing:
        old = model.run_eval(**batch)
    with nxdpp.replayed_routing(model, routing):
        loss = model.run_train(**batch)
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from nxdpp.experts.participant import Experts
from nxdpp.experts.routing import Routing, StepRouting, with_given
from nxdpp.pipeline.activation_checkpoint import forward_within
from nxdpp.pipeline.model import NxDPPModel
from nxdpp.ranks import parallel_state
from nxdpp.tracing.modules import listings


@contextmanager
def recorded_routing(model: NxDPPModel[bool, bool]) -> Iterator[Routing]:
    """Record the experts that tokens choose in a block; not collective.

    Returns a list that gets an entry for each step in the block, training step or evaluation: by the name of each layer
    of experts on this rank, and by the number of each microbatch, the chosen experts ``(N, K)``, int64 on the layer's
    device. ``torch.save`` writes it.

    Raises ``TypeError`` for a ``model`` that is no ``NxDPPModel``, ``ValueError`` for one without experts over ranks,
    and ``RuntimeError`` in a step for a layer of experts that runs twice in a forward.
    """
    routing, record = _routing_of(model, "recorded_routing"), Routing()
    before, routing.record = routing.record, record
    try:
        yield record
    finally:
        routing.record = before


@contextmanager
def replayed_routing(model: NxDPPModel[bool, bool], routing: Sequence[dict[str, dict[int, Any]]]) -> Iterator[None]:
    """Give tokens in a block the experts of a record; not collective, and on every rank.

    The record ``routing`` has the form of ``recorded_routing``. The first step in the block gets the first entry, and
    so on, with the same microbatches over the same stages, under any schedule. A layer that is computed again in a
    backward gets the same experts again.

    The given experts take the place of the result of ``torch.topk`` in the forward of the module around the experts. So
    their weights are computed from the present scores of the router, and have gradients. Whatever else looks at scores
    is as without a replay, as auxiliary losses are.

    Raises:
        TypeError: for a ``model`` that is no ``NxDPPModel``.
        ValueError: for a model without experts over ranks, for experts that it does not have, and in a step for
            microbatches, layers and numbers of tokens that ``routing`` does not have.
        RuntimeError: in a step, for a router that does not choose by ``torch.topk`` over all experts.

    After Ma et al., "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers" (arXiv
    2510.11370).
    """
    own = _routing_of(model, "replayed_routing")
    modules = dict(listings.named_modules(model.steps.part.module))
    counts = {layer: _count(layer) for layer in own.names}
    for layer, name in own.names.items():
        _check(name, [each for step in routing for each in step.get(name, {}).values()], counts[layer])
    before, own.replay = own.replay, list(routing)
    with ExitStack() as stack:
        stack.callback(setattr, own, "replay", before)
        for layer, name in own.names.items():
            module = modules[name.rpartition(".")[0]]
            given = partial(with_given, layer=layer, routing=own, experts=counts[layer])
            had, vars(module)["forward"] = vars(module).get("forward"), forward_within(module, given)
            stack.callback(_restore, module, had)
        yield


def _restore(module: nn.Module, forward: Any) -> None:
    if forward is None:
        del vars(module)["forward"]
    else:
        vars(module)["forward"] = forward


def _routing_of(model: Any, name: str) -> StepRouting:
    if not isinstance(model, NxDPPModel):
        raise TypeError(f"{name} takes a wrapped model, not a {type(model).__name__}: NxDPPModel(module, ...)")
    found = [each.routing for each in model.steps.participants.all if isinstance(each, Experts)]
    if not found:
        raise ValueError(
            f"{name} takes a model whose experts are divided over ranks: "
            f"initialize_model_parallel(expert_model_parallel_size=...), NxDPPModel(expert_parallelize(module), ...)"
        )
    return found[0]


def _count(layer: nn.Module) -> int:
    own: Any = layer.own_experts
    return int(own) * parallel_state.get_expert_model_parallel_size()


def _check(name: str, given: Sequence[Any], count: int) -> None:
    """Raise ``ValueError`` for choices ``(N, K)`` of experts that the layer ``name`` does not have."""
    for each in given:
        if not isinstance(each, torch.Tensor) or each.dtype != torch.int64 or each.dim() != 2:
            raise ValueError(f"the routing of {name} must have tensors (N, K) of int64 for each microbatch")
        if each.numel() and not 0 <= int(each.min()) <= int(each.max()) < count:
            raise ValueError(f"the routing of {name} names experts {int(each.min())} to {int(each.max())} of {count}")
