"""Auxiliary losses that layers leave behind, over real processes and every kind of schedule, bit for bit."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from nxdpp import NxDPPModel, apply_checkpoint, parallel_state
from tests.support.models import VOCABULARY, gradient_differences, padded_batch, reference
from tests.support.run_ranks import run_ranks

COUNT = 4
WIDTH = 4


class Layer(nn.Module):
    """A small mixture of experts that leaves its balancing loss behind."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.l_aux: Any = None

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        self.l_aux = weights.mean(0).square().sum()
        mixed: Tensor = x + sum(weights[:, i : i + 1] * expert(x).tanh() for i, expert in enumerate(self.experts))
        return mixed


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Any:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        auxiliary: Any = 0.0
        for module in self.modules():
            if hasattr(module, "l_aux") and module.l_aux is not None:
                auxiliary = auxiliary + module.l_aux
        return self.head(x).square().mean() + 0.1 * auxiliary


def mixtral(layers: int) -> MixtralForCausalLM:
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "pad_token_id": 0}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
    balanced: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, **balanced, num_hidden_layers=layers))


def check(schedule: str, kind: Any, checkpointed: bool) -> None:
    torch.manual_seed(1)
    model = kind(5)
    whole = reference(model)
    is_plain = kind is Model
    arguments: dict[str, Any] = {"transformer_layer_cls": Layer} if is_plain else {}
    arguments |= {"schedule": schedule, "broadcast_and_average_loss": True}
    wrapped = NxDPPModel(model, num_microbatches=COUNT, **arguments)
    wrapped.move_model_to_device()
    if checkpointed:
        apply_checkpoint(wrapped)
    for seed in range(2):
        batch = padded_batch(2 * COUNT, seed=seed)
        if is_plain:
            batch = {"x": torch.randn(2 * COUNT, WIDTH, generator=torch.Generator().manual_seed(seed))}
        loss = wrapped.run_train(**batch)
        losses = []
        for i in range(COUNT):
            part = whole(**{name: value.chunk(COUNT)[i] for name, value in batch.items()})
            expected = part if is_plain else part.loss
            (expected / COUNT).backward()
            losses.append(expected.detach())
        assert isinstance(loss, torch.Tensor)
        assert torch.equal(loss, torch.stack(losses).mean()), (schedule, kind, checkpointed)
    assert gradient_differences(wrapped, whole) == {}, (schedule, kind, checkpointed)


def train(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    for schedule in ("1f1b", "interleaved", "zb-v"):
        check(schedule, Model, checkpointed=schedule == "1f1b")
    check("zb-v", mixtral, checkpointed=False)
    check("1f1b", mixtral, checkpointed=True)


def test_losses_and_gradients_are_those_of_one_process() -> None:
    run_ranks(2, train)
