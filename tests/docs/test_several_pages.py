"""docs/guide/several_models.md and several_optimizers.md print on 4 ranks, and in one process, what they print on 2."""

import contextlib
import copy
import io
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.docs.pages import GUIDE, printed_text, script
from tests.docs.torchrun import run

pytestmark = pytest.mark.one_python

NAMES = ["several_models", "several_optimizers"]


class OneProcess:
    """A module that a script of one process trains on microbatches, with the calls of a wrapped one."""

    def __init__(self, module: nn.Module, num_microbatches: int, **_: Any) -> None:
        self._module = module
        self._number = num_microbatches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def _microbatches(self, inputs: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        rows = {name: value.chunk(self._number) for name, value in inputs.items()}
        return [{name: value[number] for name, value in rows.items()} for number in range(self._number)]

    def run_train(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Run forward and backward; return the mean of the losses."""
        losses = []
        for microbatch in self._microbatches(inputs):
            loss = self._module(**microbatch)
            (loss / self._number).backward()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    @torch.no_grad()
    def run_eval(self, everywhere: bool = False, **inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs, or the mean of the losses."""
        outputs = [self._module(**microbatch) for microbatch in self._microbatches(inputs)]
        return torch.cat(outputs) if outputs[0].ndim else torch.stack(outputs).mean()

    def clip_grad_norm_(self, norm: float) -> torch.Tensor:
        """Clip as torch does."""
        return nn.utils.clip_grad_norm_(self._module.parameters(), norm)


def _of_one_process() -> ModuleType:
    """Stand-in for nxdpp in a script of one process, whose checkpoints are copies of torch's state dicts."""
    saved: dict[str, Any] = {}

    def states(*parts: Any) -> list[Any]:
        return [each for part in parts for each in (part.values() if isinstance(part, dict) else [part])]

    def save(path: str, tag: str, *parts: Any) -> None:
        saved[path] = [copy.deepcopy(each.state_dict()) for each in states(*parts)]

    def load(path: str, tag: str, *parts: Any) -> None:
        for each, state in zip(states(*parts), saved[path], strict=True):
            each.load_state_dict(state)

    found: Any = ModuleType("nxdpp")
    found.NxDPPModel, found.save_checkpoint, found.load_checkpoint = OneProcess, save, load
    found.parallel_state = SimpleNamespace(initialize_model_parallel=lambda **_: None)
    module: ModuleType = found
    return module


@pytest.mark.parametrize("name", NAMES)
def test_a_page_prints_what_one_process_prints(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    page = GUIDE / f"{name}.md"
    monkeypatch.setitem(sys.modules, "nxdpp", _of_one_process())
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(script(page), str(page), "exec"), {"__name__": "__main__"})
    assert printed.getvalue().split() == " ".join(printed_text(page).values()).split()


@pytest.mark.parametrize("name", NAMES)
def test_a_page_prints_the_same_on_4_ranks(name: str, tmp_path: Path) -> None:
    page, file = GUIDE / f"{name}.md", tmp_path / "empty" / "train.py"
    text = script(page)
    assert text.count("pipeline_model_parallel_size=2") == 1
    file.parent.mkdir()
    file.write_text(text.replace("pipeline_model_parallel_size=2", "pipeline_model_parallel_size=4"))
    ended = run(file, 4)
    assert ended.status == 0, ended.account
    lines = [line for line in ended.outputs[0].splitlines() if line]
    assert lines == printed_text(page)[0].strip().splitlines()
