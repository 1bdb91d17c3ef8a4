"""A Llama over XLA ranks: the losses of the CPU, and each graph compiled once."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from nxdpp import NxDPPModel, parallel_state
from tests.support.run_ranks import run_ranks
from tests.support.xla_ranks import compilations, run_xla_ranks


def _train(rank: int, device: str | None) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, device=device)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = NxDPPModel(
        LlamaForCausalLM(config),
        transformer_layer_cls=LlamaDecoderLayer,
        num_microbatches=4,
        broadcast_and_average_loss=True,
    )
    model.move_model_to_device()
    optimizer = torch.optim.AdamW(list(model.local_parameters()), lr=1e-3)
    losses: list[float] = []
    graphs: list[int] = []
    for step in range(5):
        ids = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(step))
        if parallel_state.local_device().type == "xla":
            with compilations(graphs):
                losses.append(_step(model, optimizer, ids))
        else:
            losses.append(_step(model, optimizer, ids))
    return {"losses": losses, "graphs": graphs, "device": parallel_state.local_device().type}


def _step(model: NxDPPModel, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    loss = model.run_train(input_ids=ids, labels=ids)
    assert isinstance(loss, torch.Tensor)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_two_ranks_give_the_losses_of_the_cpu_and_compile_once() -> None:
    on_cpu = run_ranks(2, _train, None)
    on_xla = run_xla_ranks(2, _train, "xla")
    for cpu, xla in zip(on_cpu, on_xla, strict=True):
        assert (cpu["device"], xla["device"]) == ("cpu", "xla")
        torch.testing.assert_close(torch.tensor(xla["losses"]), torch.tensor(cpu["losses"]), rtol=0, atol=1e-5)
        assert xla["graphs"][0] > 0
        assert xla["graphs"][2:] == [0, 0, 0]
