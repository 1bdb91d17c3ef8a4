"""Lines of torch_xla's own scripts in a training: the numbers are those without them, on two replicas of two stages."""

from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from tests.support.run_ranks import run_ranks
from tests.support.xla_ranks import run_xla_ranks
from tests.xla.models import batch, layer_class, llama

_STEPS = 3


def _nothing() -> None:
    pass


def _step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def _train(
    between: Callable[[], object] = _nothing,
    step: Callable[[torch.optim.Optimizer], object] = _step,
    batches: Iterable[dict[str, torch.Tensor]] | None = None,
) -> list[float]:
    """Losses of three steps, with ``between`` after each line."""
    model: nn.Module = llama(num_hidden_layers=2)
    wrapped = NxDPPModel(
        model, transformer_layer_cls=layer_class(model), num_microbatches=2, broadcast_and_average_loss=True
    )
    wrapped.move_model_to_device()
    optimizer = torch.optim.AdamW(list(wrapped.local_parameters()), lr=1e-2)
    losses = []
    for inputs in _batches() if batches is None else batches:
        between()
        loss = wrapped.run_train(**inputs)
        assert isinstance(loss, torch.Tensor)
        between()
        step(optimizer)
        between()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _batches() -> list[dict[str, torch.Tensor]]:
    """Other rows on each replica."""
    return [batch(2 * number + parallel_state.get_data_parallel_rank()) for number in range(_STEPS)]


def _on_cpu(rank: int) -> list[float]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    return _train()


def _on_xla(rank: int, folder: str) -> dict[str, Any]:
    torch_xla, xm = import_module("torch_xla"), import_module("torch_xla.core.xla_model")
    # It replaces dist.new_group by a function without all of its arguments.
    import_module("torch_xla.distributed.xla_backend")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, device="xla")
    groups = parallel_state.get_data_parallel_group(as_list=True)
    loader = import_module("torch_xla.distributed.parallel_loader").MpDeviceLoader

    def step_of_guides(optimizer: torch.optim.Optimizer) -> None:
        xm.optimizer_step(optimizer, groups=groups)
        xm.mark_step()

    losses = {
        "plain": _train(),
        "xm.optimizer_step and xm.mark_step": _train(step=step_of_guides),
        "a barrier": _train(step=lambda optimizer: xm.optimizer_step(optimizer, barrier=True, groups=groups)),
        "torch_xla.sync everywhere": _train(between=lambda: torch_xla.sync(wait=True)),
        "MpDeviceLoader": _train(batches=loader(_batches(), xm.xla_device()), step=step_of_guides),
    }
    with torch_xla.step():
        losses["torch_xla.step"] = _train()
    path = Path(folder) / f"{rank}.pt"
    values = torch.arange(4.0).to(xm.xla_device())
    xm.save({"values": values * 2}, path, master_only=False)
    xm.master_print("a line")
    return {"losses": losses, "saved": torch.load(path)["values"].tolist()}


def test_lines_of_torch_xla_change_no_number(tmp_path: Path) -> None:
    on_cpu = run_ranks(4, _on_cpu)
    for rank, cpu in zip(run_xla_ranks(4, _on_xla, str(tmp_path)), on_cpu, strict=True):
        plain = rank["losses"]["plain"]
        torch.testing.assert_close(torch.tensor(plain), torch.tensor(cpu), rtol=0, atol=2e-5)
        assert rank["losses"] == dict.fromkeys(rank["losses"], plain)
        assert rank["saved"] == [0.0, 2.0, 4.0, 6.0]
