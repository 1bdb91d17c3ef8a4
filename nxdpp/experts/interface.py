"""transformers' interface of implementations of experts over ranks: ours is one, and another may take its place.

``EPImplementationInterface`` has classes by name. A type's experts are called with the tokens of a rank, and bring them
to the ranks of their experts and back: with DeepEP's kernels, or as transformers' own ``"all_to_all"`` does. Ours is
``"nxdpp"`` there, after ``initialize_model_parallel`` for ``DistributedConfig(ep_implementation="nxdpp")`` too.
"""

import weakref
from types import SimpleNamespace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from nxdpp.experts.tokens import dispatched
from nxdpp.ranks import current_state, parallel_state

OURS = "nxdpp"
_NAME = "ep_implementation"
_made: WeakKeyDictionary[nn.Module, EPImplementation] = WeakKeyDictionary()


class TokensToExperts(EPImplementation):
    """Tokens go to their experts' ranks and back, as in a pipeline; gradients of experts are sums over the tokens."""

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        if tp_mesh.size() > 1:
            raise ValueError(
                f"ep_implementation={OURS!r} takes other tokens on each rank, and {tp_mesh.size()} ranks of a tensor "
                f"group have the same: take 'all_to_all', or divide the model by nxdpp.tensor_parallelize"
            )

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the outputs ``(N, H)`` of this rank's tokens; collective over the expert group."""
        given = hidden_states, top_k_index, top_k_weights
        count, group = cast(int, self.num_local_experts), self.ep_mesh.get_group()
        return dispatched(self.experts_forward, count, *given, group, mean=False)[0]


EPImplementationInterface.register(OURS, TokensToExperts)


def choose_implementation(experts: nn.Module, name: str) -> None:
    """Let ``experts`` be called by the implementation ``name``."""
    vars(experts)[_NAME] = name


def check_implementation(name: str) -> None:
    """Raise ``ValueError`` for a ``name`` that is not registered."""
    known = EPImplementationInterface()
    if name not in known:
        raise ValueError(
            f"ep_implementation={name!r} is not registered: give one of {', '.join(map(repr, known))}, or register a "
            f"class by transformers' EPImplementationInterface.register"
        )


class _Scaled(torch.autograd.Function):
    """A tensor whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.scale, None


def other_implementation(experts: Any, place: int, count: int) -> Any:
    """Return the implementation other than ours that was chosen for ``experts``, or ``None``.

    It is a function of the tokens, the chosen experts and their weights. Gradients of the ``count`` experts of this
    rank are the mean over the expert group, as with ours. ``experts`` are a ``DividedExperts`` module, and ``place`` is
    that of the chosen experts among its arguments.
    """
    name = vars(experts).get(_NAME, OURS)
    if name == OURS:
        return None
    if experts not in _made:
        # Each tensor-parallel rank computes whole experts: no other rank has its tokens.
        groups = parallel_state.get_expert_model_parallel_group(), current_state.with_groups().own_group
        meshes = [DeviceMesh.from_group(each, parallel_state.local_device().type) for each in groups]
        # What is kept by module must not keep it alive.
        alive = weakref.proxy(experts)
        local = SimpleNamespace(
            forward=lambda *given: alive.run_own(place, *given),
            num_experts=count,
            config=getattr(experts, "config", None),
        )
        _made[experts] = EPImplementationInterface()[name](local, *meshes)
    implementation, ranks = _made[experts], parallel_state.get_expert_model_parallel_size()

    def call(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        given = _Scaled.apply(hidden, ranks), index, _Scaled.apply(weights, ranks)  # type: ignore[no-untyped-call]
        outputs: torch.Tensor = _Scaled.apply(implementation(*given), 1 / ranks)  # type: ignore[no-untyped-call]
        return outputs

    return call
