"""All schedule families over XLA ranks: the numbers of the CPU, and no graph compiled after the first step."""

from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from nxdpp import NxDPPModel, parallel_state
from nxdpp.pipeline.backward import structure
from nxdpp.pipeline.backward.split import SplitBackward
from nxdpp.schedules.families.registry import FAMILIES
from tests.support.run_ranks import run_ranks
from tests.support.xla_ranks import compilations, run_xla_ranks
from tests.xla.tiny_llama import MICROBATCHES, gradients_of_one_process, tiny_llama, tokens

_STEPS = 4


def _train_all(rank: int, device: str | None, world: int, layers: int, names: list[str]) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world, device=device)
    found: dict[str, Any] = {name: _train(name, layers) for name in names}
    found["alone"] = gradients_of_one_process(tiny_llama(layers), tokens(0), parallel_state.local_device())
    return found


def _train(name: str, layers: int) -> dict[str, Any]:
    """Train ``_STEPS`` steps with a family."""
    model = NxDPPModel(
        tiny_llama(layers),
        transformer_layer_cls=LlamaDecoderLayer,
        num_microbatches=MICROBATCHES,
        broadcast_and_average_loss=True,
        schedule=name,
        virtual_pipeline_size=2 if name == "interleaved" else 1,
    )
    model.move_model_to_device()
    optimizer = torch.optim.AdamW(list(model.local_parameters()), lr=1e-3)
    losses, in_steps, in_optimizer = list[torch.Tensor](), list[int](), list[int]()
    gradients: dict[str, torch.Tensor] = {}
    for step in range(_STEPS):
        ids = tokens(step)
        with compilations(in_steps):
            loss = model.run_train(input_ids=ids, labels=ids)
        gradients = gradients or {n: p.grad.cpu() for n, p in model.local_named_parameters() if p.grad is not None}
        with compilations(in_optimizer):
            optimizer.step()
            optimizer.zero_grad()
        assert isinstance(loss, torch.Tensor)
        losses.append(loss.cpu())
    return {"losses": losses, "gradients": gradients, "in steps": in_steps, "in optimizer": in_optimizer}


def _compare(world: int, layers: int, names: list[str]) -> None:
    on_cpu = run_ranks(world, _train_all, None, world, layers, names)
    on_xla = run_xla_ranks(world, _train_all, "xla", world, layers, names, timeout=500)
    for cpu, xla in zip(on_cpu, on_xla, strict=True):
        for name in names:
            known, found = cpu[name], xla[name]
            _close(found["losses"], known["losses"], 1e-5)
            _close(found["gradients"], known["gradients"], 1e-5)
            _close(found["gradients"], {n: xla["alone"][n] for n in known["gradients"]}, 1e-6)
            assert found["in steps"][1:] == [0] * (_STEPS - 1), name
            assert found["in optimizer"][2:] == [0] * (_STEPS - 2), name
        assert xla[names[0]]["in steps"][0] > 0


def _close(found: Any, known: Any, tolerance: float) -> None:
    torch.testing.assert_close(found, known, rtol=0, atol=tolerance)


def test_each_family_over_two_ranks() -> None:
    _compare(2, 4, list(FAMILIES))


def _split(rank: int, world: int, layers: int, names: list[str]) -> dict[str, Any]:
    """Train as a torch that shows the hooks of saved tensors: weight-gradients are computed by calls of nodes."""
    deferred: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(structure, "unpack_hook", lambda saved: None)
        weight_gradients = SplitBackward.weight_gradients

        def counted(split: SplitBackward) -> None:
            deferred.append(sum(len(work.split_nodes) for work in split._work or ()))
            weight_gradients(split)

        patch.setattr(SplitBackward, "weight_gradients", counted)
        return _train_all(rank, "xla", world, layers, names) | {"deferred": deferred}


def test_split_backwards_have_the_gradients_of_one_process() -> None:
    names = ["zb-h1", "zb-v"]
    for found in run_xla_ranks(2, _split, 2, 4, names, timeout=300):
        assert any(found["deferred"])
        for name in names:
            own = found[name]["gradients"]
            _close(own, {parameter: found["alone"][parameter] for parameter in own}, 1e-6)
            assert found[name]["in steps"][1:] == [0] * (_STEPS - 1), name


def test_families_of_several_stages_a_rank_over_four_ranks() -> None:
    _compare(4, 8, ["interleaved", "zb1p", "zb-v"])
