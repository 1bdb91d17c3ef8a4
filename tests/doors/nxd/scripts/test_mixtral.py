"""Calls of NxD 2.29's Mixtral script with their arguments, without Lightning's loop: TP + PP.

Each layer has experts, and the logits of its router go through the pipeline. Numbers equal a training in one process.
"""

from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

import nxdpp as nxd
from nxdpp.modules.moe.expert_mlps import ExpertMLPs
from nxdpp.modules.moe.loss_function import load_balancing_loss_func
from nxdpp.modules.moe.model import MoE
from nxdpp.modules.moe.routing import RouterTopK
from nxdpp.parallel_layers import mappings, parallel_state
from nxdpp.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding
from nxdpp.parallel_layers.loss_functions import parallel_cross_entropy
from tests.doors.nxd.scripts.comparison import Run, compare
from tests.doors.nxd.scripts.llama import (
    VOCABULARY,
    Attention,
    CoreAttention,
    RMSNorm,
    Rotary,
    init_weights,
    llama_config,
)
from tests.support.local_slice import local_slice
from tests.support.run_ranks import run_ranks

STEPS, BATCH, LENGTH, RATE = 2, 8, 8, 1.0
EXPERTS: dict[str, Any] = {"num_experts": 4, "top_k": 2}
COEFFICIENT = 0.02


def experts_of(config: Any) -> MoE:
    init_method = partial(nn.init.normal_, mean=0.0, std=config.initializer_range)
    router = RouterTopK(
        **EXPERTS,
        hidden_size=config.hidden_size,
        sequence_parallel_enabled=True,
        sequence_dimension=0,
        jitter_eps=0.0,
    )
    expert_mlps = ExpertMLPs(
        **EXPERTS,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        hidden_act=config.hidden_act,
        glu_mlp=True,
        capacity_factor=None,
        normalize_top_k_affinities=True,
        init_method=init_method,
        output_layer_init_method=init_method,
    )
    return MoE(
        router=router,
        expert_mlps=expert_mlps,
        return_router_logits=True,
        return_expert_index=False,
        sequence_parallel_enabled=config.sequence_parallel_enabled,
        sequence_dimension=0,
    )


class MixtralLayer(nn.Module):
    """Attention and experts."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        more = {"eps": config.rms_norm_eps, "sequence_parallel_enabled": config.sequence_parallel_enabled}
        self.self_attn, self.mlp, self.inner_size = Attention(config), experts_of(config), config.intermediate_size
        self.input_layernorm = RMSNorm(config.hidden_size, **more)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, **more)

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any, past_router_logits: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # By this name scripts tell experts from a dense layer.
        assert type(self.mlp).__name__ == "MoE"
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), position_embeddings)
        hidden_states = hidden_states + attended
        computed, router_logits = self.mlp(self.post_attention_layernorm(hidden_states))
        if past_router_logits is not None:
            router_logits = torch.cat((past_router_logits, router_logits), dim=0)
        return hidden_states + computed, router_logits

    def zero_padding_weights(self) -> None:
        """Pad a quarter of each expert's inner size."""
        rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_size()
        experts: Any = self.mlp.expert_mlps.mlp_op
        keep = (torch.arange(self.inner_size) % 8 < 6).float()
        with torch.no_grad():
            experts.gate_up_proj.weight.mul_(local_slice(keep.repeat(2), 0, rank, size, 2).view(1, 1, -1))
            experts.down_proj.weight.mul_(local_slice(keep, 0, rank, size, 1).view(1, -1, 1))


class MixtralForCausalLM(LlamaPreTrainedModel):
    """The sequence is first, and divided under sequence parallelism."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        init_method = partial(nn.init.normal_, mean=0.0, std=config.initializer_range)
        self.embed_tokens = ParallelEmbedding(
            config.vocab_size, config.hidden_size, config.pad_token_id, init_method=init_method
        )
        self.layers = nn.ModuleList([MixtralLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, sequence_parallel_enabled=True)
        self.rotary_emb = Rotary(config=config)
        self.lm_head = ColumnParallelLinear(
            config.hidden_size, config.vocab_size, bias=False, gather_output=False, init_method=init_method
        )
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        hidden_states = self.embed_tokens(input_ids)
        position_embeddings = self.rotary_emb(hidden_states, positions)
        hidden_states = hidden_states.transpose(0, 1).contiguous()
        hidden_states = mappings.scatter_to_sequence_parallel_region(hidden_states)
        router_logits: Any = None
        for layer in self.layers:
            hidden_states, router_logits = layer(hidden_states, position_embeddings, router_logits)
        hidden_states = self.norm(hidden_states)
        hidden_states = mappings.gather_from_sequence_parallel_region(hidden_states, to_model_parallel=False)
        logits = self.lm_head(hidden_states.transpose(0, 1).contiguous()).double()[:, :-1].contiguous()
        loss = parallel_cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()).mean()
        aux_loss = load_balancing_loss_func(router_logits, EXPERTS["num_experts"], EXPERTS["top_k"])
        return loss + COEFFICIENT * aux_loss, aux_loss, logits, router_logits

    def zero_padding_weights(self) -> None:
        for layer in self.layers:
            cast(MixtralLayer, layer).zero_padding_weights()


def init_mixtral(module: nn.Module, device: torch.device) -> None:
    if isinstance(module, nn.Linear):
        module.reset_parameters()
    init_weights(module, device)


OPTIONS: dict[str, Any] = {"sequence_parallel_enabled": True, "num_hidden_layers": 2}


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator) for _ in range(STEPS)]


def one_process() -> Run:
    parallel_state.initialize_model_parallel()
    try:
        torch.manual_seed(1)
        # The same initial values as any layout has.
        meta = {"meta_device_init": True, "param_init_fn": init_mixtral}
        config = nxd.neuronx_distributed_config(model_init_config=meta)
        model: Any = nxd.initialize_parallel_model(config, MixtralForCausalLM, False, llama_config(**OPTIONS))
        model.module.zero_padding_weights()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        losses, norms = [], []
        for batch in batches():
            each = torch.stack([model(part, part)[0] for part in batch.chunk(4)])
            each.mean().backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(each.mean().item())
        return losses, norms, {name: value.detach().clone() for name, value in model.named_parameters()}
    finally:
        parallel_state.destroy_model_parallel()


def train(rank: int, run: Run) -> None:
    losses, norms, final = run
    config = nxd.neuronx_distributed_config(
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        expert_parallel_size=1,
        pipeline_config={
            "transformer_layer_cls": MixtralLayer,
            "num_microbatches": 4,
            "output_loss_value_spec": (True, False, False, False),
            "input_names": ["input_ids", "labels"],
            "auto_partition": True,
            "trace_file_path": None,
            "param_init_fn": None,
            "leaf_module_cls": [RMSNorm.__name__, Rotary.__name__],
            "autowrap_modules": [mappings],
            "autowrap_functions": [load_balancing_loss_func],
            "use_zero1_optimizer": True,
            "use_optimizer_wrapper": True,
            "broadcast_and_average_loss": False,
        },
        optimizer_config={"zero_one_enabled": True, "grad_clipping": True, "max_grad_norm": 1.0},
        sequence_parallel=True,
        activation_checkpoint_config=(CoreAttention, MoE),
        model_init_config={"meta_device_init": True, "param_init_fn": init_mixtral, "sequential_move_factor": 11},
    )
    torch.manual_seed(1)
    model = nxd.initialize_parallel_model(config, MixtralForCausalLM, False, llama_config(**OPTIONS))
    with pytest.raises(RuntimeError, match="another rank holds"):
        model.zero_padding_weights()
    for module in model.local_modules():
        if isinstance(module, MixtralLayer):
            module.zero_padding_weights()
    assert cast(Any, model.module).config.model_type == "llama"
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.SGD, list(model.parameters()), lr=RATE)
    for batch, expected, norm in zip(batches(), losses, norms, strict=True):
        loss = model.run_train(input_ids=batch, labels=batch)
        if loss is not None:
            torch.testing.assert_close(loss.item(), expected, rtol=1e-5, atol=1e-6)
        optimizer.step()
        torch.testing.assert_close(optimizer.grad_norm, torch.tensor(norm), rtol=1e-4, atol=0)
        optimizer.zero_grad()
    compare(model.local_named_parameters(), final)


def test_mixtral_scripts_give_the_numbers_of_one_process() -> None:
    run_ranks(4, train, one_process())
