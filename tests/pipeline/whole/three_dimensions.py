"""One case of tensor x pipeline x data parallelism: a small Llama on the ranks, and its training in one process."""

from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer as WholeLayer
from transformers.models.llama.modeling_llama import LlamaForCausalLM as WholeLlama

from nxdpp import NxDPPModel, parallel_state, tensor_parallelize
from nxdpp.tensor.utils import local_slice

STEPS, BATCH, MICROBATCHES, LENGTH, MAX_NORM = 8, 8, 2, 8, 0.5
CONFIG: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "use_cache": False,
}


class Case(NamedTuple):
    """One comparison."""

    tensor: int
    pipeline: int
    data: int
    sequence: bool
    schedule: str
    unmodified: bool = False


class Training(NamedTuple):
    """Loss and norm of each step, and the parameters afterwards."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, torch.Tensor]


def config() -> LlamaConfig:
    return LlamaConfig(**CONFIG)


def initial_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    return dict(WholeLlama(config()).state_dict())


def train_whole(state: dict[str, torch.Tensor]) -> Training:
    """Train the unmodified model of transformers."""
    model = WholeLlama(config())
    model.load_state_dict(state)
    optimizer = _optimizer(list(model.parameters()))
    losses, norms = [], []
    for step in range(STEPS):
        loss = model(input_ids=_batch(step), labels=_batch(step)).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Training(losses, norms, {name: p.detach() for name, p in model.named_parameters()})


def check(case: Case, state: dict[str, torch.Tensor], whole: Training) -> None:
    """Train as ``case`` tells, and compare with ``whole``; collective over all ranks."""
    parallel_state.initialize_model_parallel(case.tensor, case.pipeline)
    assert parallel_state.get_data_parallel_size() == case.data
    module, layer_class = _module(case, state)
    model = NxDPPModel(
        module,
        transformer_layer_cls=layer_class,
        num_microbatches=MICROBATCHES,
        virtual_pipeline_size=2 if case.schedule == "zb-v" else 1,
        schedule=case.schedule,
        broadcast_and_average_loss=True,
    )
    optimizer = _optimizer(list(model.local_parameters()))
    losses, norms = [], []
    for step in range(STEPS):
        ids = _batch(step).chunk(case.data)[parallel_state.get_data_parallel_rank()]
        loss = model.run_train(input_ids=ids, labels=ids)
        assert isinstance(loss, torch.Tensor)
        norms.append(model.clip_grad_norm_(MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert min(norms) > MAX_NORM, "no step was clipped"
    torch.testing.assert_close(losses, whole.losses, rtol=0, atol=1e-5, msg=lambda text: f"{case}: losses: {text}")
    torch.testing.assert_close(norms, whole.norms, rtol=1e-5, atol=0, msg=lambda text: f"{case}: norms: {text}")
    for name, parameter in model.local_named_parameters():
        theirs = _own(parameter, whole.parameters[name])
        distance = (parameter.detach() - theirs).norm() / theirs.norm()
        assert distance < 1e-5, f"{case}: {name} differs by {distance:.1e}"
    parallel_state.destroy_model_parallel()


def _module(case: Case, state: dict[str, torch.Tensor]) -> tuple[torch.nn.Module, type[torch.nn.Module]]:
    """The divided model, and the class of its layers."""
    if case.unmodified:
        whole = WholeLlama(config())
        whole.load_state_dict(state)
        return tensor_parallelize(whole, sequence_parallel=case.sequence), WholeLayer
    from parallel_llama import LlamaDecoderLayer, LlamaForCausalLM

    module = LlamaForCausalLM(config(), sequence_parallel=case.sequence)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(_own(parameter, state[name]))
    return module, LlamaDecoderLayer


def _batch(step: int) -> torch.Tensor:
    return torch.randint(CONFIG["vocab_size"], (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def _optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _own(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    dim = getattr(parameter, "partition_dim", -1)
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_size()
    return whole if dim < 0 else local_slice(whole, dim, rank, size)
