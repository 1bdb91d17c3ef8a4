"""The line in the note on torch's "optimizer got an empty parameter list", followed where a rank trains nothing."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from nxdpp import NxDPPModel, parallel_state
from nxdpp.doors.nxd.checkpoint import load_checkpoint, save_checkpoint
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer
from nxdpp.ranks.faults.mistakes import add_note
from tests.support.run_ranks import run_ranks

STEPS, STOP, MICROBATCHES = 4, 2, 4
KINDS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "AdamW": (AdamW, {"lr": 0.05}),
    "Zero1Optimizer": (Zero1Optimizer, {"optimizer_class": AdamW, "grad_clipping": False, "lr": 0.05}),
}


def _build() -> nn.Sequential:
    """Four layers, of which one is trained."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).requires_grad_(False)
    model.get_submodule("0").requires_grad_(True)
    return model


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator)


def _in_one_process(kind: str) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """The script of one process: losses, norms and the trained values."""
    model = _build()
    make, options = KINDS[kind]
    if make is Zero1Optimizer:
        make, options = AdamW, {"lr": options["lr"]}
    optimizer = make([each for each in model.parameters() if each.requires_grad], **options)
    losses, norms = [], []
    for step in range(STEPS):
        x, target = _batch(step)
        loss = torch.zeros(())
        for rows, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            part = nn.functional.mse_loss(model(rows), wanted) / MICROBATCHES
            part.backward()
            loss += part.detach()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: each.detach() for name, each in model.named_parameters()}


def _line(model: NxDPPModel, make: Callable[..., Any], options: dict[str, Any]) -> str | None:
    """The line of the note, on a rank that gets torch's error."""
    try:
        make([each for each in model.parameters() if each.requires_grad], **options)
    except ValueError as error:
        add_note(error)
        (note,) = error.__notes__
        found = re.search(r"Write on every rank: (.*), \.\.\.\)\.$", note)
        assert found is not None, note
        return found[1]
    return None


def _follow(path: Path, kind: str) -> Any:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    make, options = KINDS[kind]

    def made(line: str | None) -> tuple[NxDPPModel, Any, str | None]:
        model = NxDPPModel(
            _build(),
            num_microbatches=MICROBATCHES,
            transformer_layer_cls=nn.Linear,
            loss_fn=nn.MSELoss(),
            broadcast_and_average_loss=True,
        )
        if line is None:
            lines: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(lines, _line(model, make, options))
            (line,) = {each for each in lines if each is not None}
        return model, eval(f"{line}, **options)", {kind: make, "model": model, "options": options}), line

    model, optimizer, line = made(None)
    losses, norms = [], []
    for step in range(STEPS):
        if step == STOP:
            save_checkpoint(path, kind, model, optimizer)
            model, optimizer, _ = made(line)
            load_checkpoint(path, kind, model, optimizer)
        x, target = _batch(step)
        loss = model.run_train(input=x, target=target)
        assert isinstance(loss, torch.Tensor)
        losses.append(loss.item())
        norms.append(model.clip_grad_norm_(0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: each.detach() for name, each in model.named_parameters()}


def _follow_all(rank: int, path: Path) -> dict[str, Any]:
    found = {}
    for kind in KINDS:
        found[kind] = _follow(path, kind)
        parallel_state.destroy_model_parallel()
    return found


def test_the_line_of_the_note_trains_as_one_process(tmp_path: Path) -> None:
    everyone = run_ranks(2, _follow_all, tmp_path)
    for kind in KINDS:
        losses, norms, values = _in_one_process(kind)
        for found in everyone:
            torch.testing.assert_close(found[kind][0], losses)
            torch.testing.assert_close(found[kind][1], norms)
            for name, value in found[kind][2].items():
                torch.testing.assert_close(value, values[name])
