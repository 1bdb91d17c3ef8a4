"""Tensor-parallel models on XLA ranks: the CPU's losses, gradients and trained parameters; graphs compiled once."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp import NxDPPModel, parallel_state, tensor_parallelize
from nxdpp.devices.kinds import device_of
from tests.support.run_ranks import run_ranks
from tests.support.xla_ranks import compilations, run_xla_ranks

STEPS, MICROBATCHES = 5, 2
CLOSE = 1e-5
# XLA rounds to bfloat16 at the ends of its fusions, which are others in parts of a model.
CLOSE_UNDER_AUTOCAST = 2e-2


def _llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "use_cache": False,
    }
    return LlamaForCausalLM(LlamaConfig(**(sizes | changes)))


def _for_autocast() -> LlamaForCausalLM:
    """The model without torch's fused attention, whose arguments autocast on XLA leaves in different dtypes."""
    return _llama(attn_implementation="eager")


def _train(given: LlamaForCausalLM, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Any]:
    """Losses, gradients of the first step, parameters after the third, and compilations of each step."""
    model = NxDPPModel(
        tensor_parallelize(given, **options), num_microbatches=MICROBATCHES, broadcast_and_average_loss=True
    )
    model.move_model_to_device()
    optimizer = torch.optim.AdamW(list(model.local_parameters()), lr=1e-2)
    on_xla = parallel_state.local_device().type == "xla"
    graphs: list[int] = []
    found: dict[str, Any] = {"losses": [], "graphs": graphs}
    for step in range(STEPS):
        ids = _tokens(step)
        with compilations(graphs) if on_xla else nullcontext():
            with _autocast(dtype):
                loss = model.run_train(input_ids=ids, labels=ids)
            if step == 0:
                found["gradients"] = {name: _on_host(p.grad) for name, p in model.local_named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
            assert isinstance(loss, torch.Tensor)
            found["losses"].append(loss.item())
            # The optimizer's step is one graph: no value of it is asked for before.
            device_of(parallel_state.local_device()).submit()
        if step == 2:
            found["parameters"] = {name: _on_host(p) for name, p in model.local_named_parameters()}
    return found


def _tokens(step: int) -> torch.Tensor:
    return torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(step))


def _in_one_process(rank: int) -> dict[str, Any]:
    """Loss and gradients of the first step under autocast, of the whole model on one XLA device."""
    parallel_state.initialize_model_parallel(device="xla")
    device = parallel_state.local_device()
    model: nn.Module = _for_autocast()
    model.to(device)
    total = torch.zeros((), device=device)
    for ids in _tokens(0).to(device).chunk(MICROBATCHES):
        with _autocast(torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss / MICROBATCHES
        loss.backward()
        total += loss.detach()
        device_of(device).submit()
    gradients = {name: _on_host(parameter.grad) for name, parameter in model.named_parameters()}
    return {"loss": total.item(), "gradients": gradients}


def _autocast(dtype: torch.dtype) -> Any:
    return torch.autocast(parallel_state.local_device().type, dtype, enabled=dtype != torch.float32)


def _on_host(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.detach().to("cpu", copy=True)


def _cases(rank: int, device: str | None) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(2, 2, device=device)
    found = {"sequences": _train(_llama(), sequence_parallel=True), "plain": _train(_llama())}
    if device is not None:
        found["autocast"] = _train(_for_autocast(), torch.bfloat16)
    return found


def _check_autocast(found: dict[str, Any], whole: dict[str, Any], rank: int) -> None:
    assert abs(found["losses"][0] - whole["loss"]) < CLOSE_UNDER_AUTOCAST
    assert found["gradients"]
    for name, gradient in found["gradients"].items():
        theirs = whole["gradients"][name]
        difference = (gradient - _own_part(theirs, gradient.shape, rank)).abs().max() / theirs.abs().max()
        assert difference < CLOSE_UNDER_AUTOCAST, (name, difference)


def _own_part(whole: torch.Tensor, shape: torch.Size, rank: int) -> torch.Tensor:
    for dim, size in enumerate(shape):
        whole = whole.narrow(dim, rank * size if size < whole.shape[dim] else 0, size)
    return whole


def _check_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(expected["losses"]), rtol=0, atol=CLOSE)
    for kind in ("gradients", "parameters"):
        assert found[kind].keys() == expected[kind].keys()
        for name, tensor in expected[kind].items():
            assert torch.allclose(found[kind][name], tensor, rtol=CLOSE, atol=CLOSE), (kind, name)


def test_two_stages_of_two_tensor_ranks_equal_those_of_the_cpu_and_one_process() -> None:
    whole = run_xla_ranks(1, _in_one_process)[0]
    on_cpu, on_xla = run_ranks(4, _cases, None), run_xla_ranks(4, _cases, "xla")
    for rank, (expected, found) in enumerate(zip(on_cpu, on_xla, strict=True)):
        for case in expected:
            _check_close(found[case], expected[case])
        for case, trained in found.items():
            assert trained["graphs"][2:] == [0, 0, 0], case
        _check_autocast(found["autocast"], whole, rank % 2)
