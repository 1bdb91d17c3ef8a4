"""Mixture of experts whose weights are divided over the tensor-parallel ranks, with the names of NeuronX Distributed.

::

    (S, B, H) ─ router ─▶ affinities (T, E), the top_k of each token
        │                            │
        └─▶ tokens of an expert ─ gate, up (E, H, 2 I / ranks) ─ down (E, I / ranks, H) ─ * affinity ─▶ sum over ranks

Every rank has a part of each expert. Each token is computed by its own experts only. ``T`` is ``S * B``. Under sequence
parallelism a rank gives and gets its part of the sequence.
"""

import math
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import nn
from torch.nn import functional, init

from nxdpp.ranks import parallel_state
from nxdpp.tensor import mappings
from nxdpp.tensor.initial_parts import InitMethod
from nxdpp.tensor.layers import ColumnParallelLinear, RowParallelLinear
from nxdpp.tensor.parallel_layer import ParallelLinear
from nxdpp.tensor.tensor_attributes import mark_sequence_parallel
from nxdpp.tensor.utils import ensure_divisibility

__all__ = ["ExpertMLPs", "MoE", "RouterTopK", "load_balancing_loss_func"]

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "relu": functional.relu,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
}


def load_balancing_loss_func(router_logits: torch.Tensor, num_experts: int, top_k: int) -> torch.Tensor:
    """Return the loss that keeps the experts equally busy, a float32 tensor of shape ().

    It is the sum over experts of the share of tokens that choose it times its mean probability, times ``num_experts``:
    1 for equal shares. The loss comes from "Switch Transformers" (Fedus et al., 2022).

    Args:
        router_logits: of all tokens and layers, of shape ``(tokens, num_experts)``.
        num_experts: number of experts.
        top_k: number of experts of a token.
    """
    probabilities = functional.softmax(router_logits, dim=-1, dtype=torch.float64)
    chosen = probabilities.topk(top_k).indices
    shares = functional.one_hot(chosen, num_experts).to(torch.float32).mean(0)
    return (shares * probabilities.to(torch.float32).mean(0)).sum() * (num_experts / top_k)


class RouterTopK(nn.Module):
    """Chooses the ``top_k`` experts with the largest logits for each token, without balancing them.

    Args:
        num_experts, top_k, hidden_size: experts, experts of a token, and size of a token.
        sequence_parallel_enabled: each rank gives its part of the sequence, and gets the result for all tokens.
        sequence_dimension: the dimension of the sequence, by default 0.
        dtype, device, bias: of the layer ``linear_router``, which all ranks have.
        act_fn: ``"softmax"`` or ``"sigmoid"`` gives the affinities.
        jitter_eps: largest relative change of inputs while training.

    Raises:
        ValueError: for a ``top_k`` that is not in 1 to ``num_experts``, and for a different ``act_fn``.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        bias: bool = False,
        *,
        act_fn: str = "softmax",
        jitter_eps: float = 0.0,
    ) -> None:
        super().__init__()
        if not 0 < top_k <= num_experts:
            raise ValueError(f"top_k={top_k} must be from 1 to num_experts={num_experts}.")
        if act_fn not in ("softmax", "sigmoid"):
            raise ValueError(f"act_fn={act_fn!r} must be 'softmax' or 'sigmoid'.")
        self.num_experts, self.top_k, self.hidden_size = num_experts, top_k, hidden_size
        self.sequence_parallel_enabled, self.sequence_dimension = sequence_parallel_enabled, sequence_dimension or 0
        self.act_fn, self.jitter_eps = act_fn, jitter_eps
        self.linear_router = nn.Linear(hidden_size, num_experts, bias, device, dtype)
        if sequence_parallel_enabled:
            mark_sequence_parallel(self.linear_router)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits and affinities ``(T, E)``, and experts ``(T, top_k)`` of the tokens ``(S, B, H)``."""
        inputs = hidden_states.to(self.linear_router.weight.dtype)
        if self.jitter_eps and self.training:
            inputs = inputs * torch.empty_like(inputs).uniform_(1 - self.jitter_eps, 1 + self.jitter_eps)
        logits = self.linear_router(inputs)
        if self.sequence_parallel_enabled:
            logits = mappings.gather_from_sequence_parallel_region(logits, self.sequence_dimension, False)
        logits = logits.reshape(-1, self.num_experts)
        whole = logits.to(torch.float64)
        affinities = whole.sigmoid() if self.act_fn == "sigmoid" else whole.softmax(1)
        return logits, affinities.to(hidden_states.dtype), logits.topk(self.top_k).indices


class ExpertWeight(ParallelLinear):
    """A weight ``(experts, inputs, outputs)`` of which this rank has a part along ``dim``."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        dim: int,
        stride: int,
        init_method: InitMethod,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        ensure_divisibility(shape[dim], parallel_state.get_tensor_model_parallel_size() * stride)
        _, inputs, outputs = shape
        ParallelLinear.__init__(
            self, inputs, outputs, 2 - dim, stride, init_method, False, None, False, False, None, None
        )
        self._dim = dim
        self._add_part("weight", shape, dim, dtype, device, stride=stride)
        self.register_parameter("bias", None)
        self.reset_parameters()

    def padded_sizes(self, ratio: Fraction) -> dict[str, Fraction]:
        """No sizes: experts have no heads."""
        return {}

    def of_experts(self) -> tuple[torch.Tensor, ...]:
        """The matrix ``(inputs, outputs)`` of each expert."""
        self._check_group()
        return self.get_parameter("weight").unbind(0)


class ExpertFusedColumnParallelLinear(ExpertWeight, ColumnParallelLinear):
    """The first weight of the experts; the class tells ``param_init_fn`` of scripts that it is a parallel layer."""

    gather_output = False


class ExpertFusedRowParallelLinear(ExpertWeight, RowParallelLinear):
    """The second weight of the experts, likewise."""

    input_is_parallel = True


class ExpertMLPs(nn.Module):
    """The experts: two layers each, of which the first may be gated.

    Args:
        num_experts, top_k, hidden_size: as of the router.
        intermediate_size: size ``I`` between the layers.
        hidden_act: ``"silu"``, ``"gelu"``, ``"relu"`` or ``"sigmoid"``.
        glu_mlp: multiply the activation of a gate with a second product.
        capacity_factor: an expert takes ``ceil(T * top_k * capacity_factor / num_experts)`` tokens, the first ones; the
            others go without it. ``None`` drops none.
        normalize_top_k_affinities: the affinities of a token's experts add up to 1.
        init_method, output_layer_init_method: initialise the whole weights ``(E, H, I)``, with ``2 I`` for a gate, and
            ``(E, I, H)`` in place.
        dtype, device: of the weights.

    Raises:
        ValueError: for sizes that do not divide, and a different activation.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        glu_mlp: bool,
        capacity_factor: float | None,
        *,
        normalize_top_k_affinities: bool = False,
        init_method: InitMethod = init.kaiming_uniform_,
        output_layer_init_method: InitMethod = init.kaiming_uniform_,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if hidden_act not in _ACTIVATIONS:
            raise ValueError(f"hidden_act={hidden_act!r} must be one of {', '.join(map(repr, _ACTIVATIONS))}.")
        self.num_experts, self.top_k, self.hidden_size = num_experts, top_k, hidden_size
        self.capacity_factor, self.normalize = capacity_factor, normalize_top_k_affinities
        self.is_gated, self._activation = glu_mlp, _ACTIVATIONS[hidden_act]
        count = 2 if glu_mlp else 1
        shape = (num_experts, hidden_size, count * intermediate_size)
        first = ExpertFusedColumnParallelLinear(shape, 2, count, init_method, dtype, device)
        shape = (num_experts, intermediate_size, hidden_size)
        second = ExpertFusedRowParallelLinear(shape, 1, 1, output_layer_init_method, dtype, device)
        # The names of NeuronX Distributed's checkpoints.
        self.mlp_op = nn.ModuleDict({"gate_up_proj" if glu_mlp else "up_proj": first, "down_proj": second})

    def forward(
        self, hidden_states: torch.Tensor, expert_affinities: torch.Tensor, expert_index: torch.Tensor
    ) -> torch.Tensor:
        """Return this rank's part of the sum ``(T, H)`` for tokens ``(T, H)`` and the results of a router."""
        chosen = functional.one_hot(expert_index, self.num_experts).sum(1)
        if self.capacity_factor is not None:
            tokens = len(hidden_states)
            capacity = math.ceil(tokens * self.top_k * self.capacity_factor / self.num_experts)
            chosen = chosen * (chosen.cumsum(0) <= capacity)
        affinities = expert_affinities * chosen
        if self.normalize:
            affinities = functional.normalize(affinities, p=1.0, dim=1)
        total = torch.zeros_like(hidden_states)
        first, second = (layer.of_experts() for layer in self.mlp_op.values())  # type: ignore[operator]
        for expert, (inner, outer) in enumerate(zip(first, second, strict=True)):
            rows = chosen[:, expert].nonzero().squeeze(1)
            output = self._activated(hidden_states[rows] @ inner) @ outer
            total = total.index_add(0, rows, output * affinities[rows, expert, None])
        return total

    def _activated(self, states: torch.Tensor) -> torch.Tensor:
        if not self.is_gated:
            return self._activation(states)
        gate, up = states.chunk(2, dim=-1)
        return self._activation(gate) * up


class MoE(nn.Module):
    """A router and its experts.

    Args:
        router, expert_mlps: with equal numbers and sizes.
        sequence_parallel_enabled: each rank gives and gets its part of the sequence.
        sequence_dimension: the dimension of the sequence, by default 0.
        return_router_logits, return_expert_index: return them too.

    Raises:
        ValueError: for a router and experts that do not fit.
    """

    def __init__(
        self,
        router: RouterTopK,
        expert_mlps: ExpertMLPs,
        *,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        return_router_logits: bool = False,
        return_expert_index: bool = False,
    ) -> None:
        super().__init__()
        for name in ("num_experts", "top_k", "hidden_size"):
            ours, theirs = getattr(router, name), getattr(expert_mlps, name)
            if ours != theirs:
                raise ValueError(f"the router has {name}={ours}, and the experts {theirs}: give both the same.")
        if router.sequence_parallel_enabled and not (
            sequence_parallel_enabled and router.sequence_dimension == (sequence_dimension or 0)
        ):
            raise ValueError("a sequence-parallel router needs a sequence-parallel MoE with its sequence_dimension.")
        self.router, self.expert_mlps = router, expert_mlps
        self.sequence_parallel_enabled, self.sequence_dimension = sequence_parallel_enabled, sequence_dimension or 0
        self.return_router_logits, self.return_expert_index = return_router_logits, return_expert_index

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return a tuple: the output of the shape of ``hidden_states``, and what else was asked for."""
        whole = hidden_states
        if self.sequence_parallel_enabled:
            whole = mappings.gather_from_sequence_parallel_region(hidden_states, self.sequence_dimension, False)
        routed = self.router(hidden_states if self.router.sequence_parallel_enabled else whole)
        logits, affinities, experts = routed
        # A rank computes a part of each expert, so the gradients of what it gets are added up.
        tokens = mappings.copy_to_tensor_model_parallel_region(whole.reshape(-1, whole.shape[-1]))
        affinities = mappings.copy_to_tensor_model_parallel_region(affinities)
        parts = self.expert_mlps(tokens, affinities, experts).view(whole.shape)
        if self.sequence_parallel_enabled:
            output = mappings.reduce_scatter_to_sequence_parallel_region(parts, self.sequence_dimension)
        else:
            output = mappings.reduce_from_tensor_model_parallel_region(parts)
        more = [(self.return_router_logits, logits), (self.return_expert_index, experts)]
        return (output, *(value for is_wanted, value in more if is_wanted))
