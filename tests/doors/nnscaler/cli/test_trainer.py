"""The trainer over two ranks: the loop of one process, and resumed to the bit."""

import logging
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from nxdpp import parallel_state
from nxdpp.doors.nnscaler.cli import trainer_files
from nxdpp.nnscaler.cli import Trainer
from nxdpp.nnscaler.cli.train_hook import TrainHook
from tests.doors.nnscaler.cli.trained import MLP, SimpleDataset
from tests.support.run_ranks import run_ranks

pytestmark = pytest.mark.one_python

HERE = "tests.doors.nnscaler.cli.trained"
# 9 micro-batches in 5 steps an epoch, of which the last is filled up.
YAML = f"""
compute_config:
  plan_ngpus: 2
  runtime_ngpus: 2
  constant_folding: true
  use_end2end: true
  pas_config: {{pipeline_nmicros: 2}}

run_mode: run
pas_policy: pp
micro_batch_size: 2
global_batch_size: 4
max_epochs: 2
seed: 0

model:
  type: {HERE}.MLP
  args: {{dim: 8, nlayers: 4}}

optimizer:
  type: torch.optim.Adam
  args: {{lr: 0.01}}

lr_scheduler:
  type: torch.optim.lr_scheduler.StepLR
  args: {{step_size: 1, gamma: 0.5}}

dataset:
  type: {HERE}.SimpleDataset
  train_args: {{dim: 8, size: 18}}
  val_args: {{dim: 8, size: 4}}

log:
  - type: {HERE}.Lines
    args: {{name: {{__value_type: str, value: 1}}}}

hook:
  on_step_end: {HERE}.count_steps

checkpoint:
  every_n_train_steps: 3
  keep_last_n_checkpoints: 2
"""
UNITS = ("--compute_config.plan_ngpus=1", "--pas_policy", "dp", "--compute_config.pas_config={}")


def one_process(units: int, clip: float = 0.0) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Return the weights after both epochs, and the loss and norm of each step."""
    torch.manual_seed(0)
    data = SimpleDataset(8, 18)
    loaders = [DataLoader(data, batch_size=2, sampler=DistributedSampler(data, units, unit)) for unit in range(units)]
    next(iter(loaders[0]))
    model = MLP(8, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    steps = []
    for epoch in range(2):
        for loader in loaders:
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        batches = [list(loader) for loader in loaders]
        for first in range(0, len(batches[0]), 2):
            optimizer.zero_grad()
            chosen = [batch for own in batches for batch in own[first : first + 2]]
            losses = [model(batch) for batch in chosen]
            for loss in losses:
                loss.backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(1 / len(chosen))
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip or 1e9)
            optimizer.step()
            steps.append((sum(loss.item() for loss in losses) / len(losses), float(norm)))
        scheduler.step()
    return {name: each.detach() for name, each in model.named_parameters()}, steps


def trained(folder: Path, name: str, *more: str) -> Trainer:
    """Train with the file and ``more`` arguments, and save in ``folder / name``."""
    file = folder / "train.yaml"
    argv = ["-f", str(file), f"--gen_savedir={folder / 'plans' / name}", f"--checkpoint.save-dir={folder / name}"]
    trainer = Trainer([*argv, *more])
    trainer.run()
    return trainer


def losses_of(trainer: Trainer) -> list[tuple[float, float]]:
    return [line[2:] for line in trainer.loggers[0].lines if line[0] == "train"]


def compared(rank: int, folder: Path) -> None:
    """Both layouts train as one process does."""
    weights, steps = one_process(1)
    trainer = trained(folder, "pipeline")
    assert len(list(trainer.model.parameters())) == 4
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter.cpu(), weights[name].cpu()), name
    torch.testing.assert_close(losses_of(trainer), steps)
    of_epoch = [(step, 1 if step == 4 else 2) for step in range(5)]
    assert vars(trainer)["seen"] == [(epoch, *each) for epoch in range(2) for each in of_epoch]
    lines = trainer.loggers[0].lines
    assert (lines[0], lines[-1]) == (("setup", 2), ("finalize",))
    # Before each save, and after each epoch; each is one loss over all data.
    assert [line[1] for line in lines if line[0] == "val"] == [3, 5, 6, 9, 10]
    assert trainer.optimizer.param_groups[0]["lr"] == 0.01 / 4
    if rank == 0:
        found = {path.name for path in (folder / "pipeline").iterdir()}
        best = (folder / "pipeline/best/0.ckpt").resolve().parent.name
        assert found == {"last", "best", "0001-0009", "0001-0010", best}
    parallel_state.destroy_model_parallel()

    weights, steps = one_process(2, clip=0.05)
    more = (*UNITS, "--compute_config.use_zero", "--optimizer.clip_gnorm=0.05", "--checkpoint.save_type", "deduped")
    trainer = trained(folder, "units", *more, "--global_batch_size", "8")
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(parameter.detach(), weights[name])
    torch.testing.assert_close(losses_of(trainer), steps)
    links_and_ends(rank, folder, trainer)
    parallel_state.destroy_model_parallel()


class Disturbing(TrainHook):
    """A hook that draws a number, and one whose value no checkpoint has."""

    def on_val_start(self, trainer: Trainer) -> None:
        random.random()

    def on_save_checkpoint(self, trainer: Trainer, state: dict[str, Any]) -> None:
        state["path"] = Path()


def links_and_ends(rank: int, folder: Path, trainer: Trainer) -> None:
    """The best loss is rank 0's number, values that cannot be read are refused, and epochs have all steps."""
    status, args = trainer.train_status, trainer.train_args
    best = status.best_loss
    for loss in (math.nan, 0.0 if rank else 1e9):
        trainer_files.save(trainer, 7, loss)
        assert status.best_loss == best
    assert (folder / "units/best/0.ckpt").resolve().parent.name != "0007-0006"
    assert (folder / "units/last/0.ckpt").resolve().parent.name == "0007-0006"
    trainer._hooks.append(Disturbing())
    with pytest.raises(ValueError, match=r"objects of pathlib.PosixPath cannot be resumed: save numbers, texts"):
        trainer_files.save(trainer, 8, 1.0)
    assert not list((folder / "units/0008-0006").iterdir())
    args.checkpoint.no_save = True
    lines, state = len(trainer.loggers[0].lines), random.getstate()
    trainer._validate_and_save(0, 1.0, is_last=True)
    assert random.getstate() == state
    assert len(trainer.loggers[0].lines) == lines + 1
    args.val_every_n_epochs = 2
    trainer._validate_and_save(0, 1.0, is_last=True)
    assert len(trainer.loggers[0].lines) == lines + 1
    trainer.max_train_steps = 99
    for total, word in ((2, "more"), (4, "fewer")):
        status.finished_train_steps, trainer.total_train_steps_per_epoch = 0, total
        with pytest.raises(RuntimeError, match=f"epoch 0 has {word} steps than {total}, by len.. of the loader"):
            trainer._train_epoch(0)
    assert bool(logging.getLogger().handlers) == (rank == 0)


def resumed(rank: int, folder: Path) -> None:
    """A training that ends in the middle of an epoch, and one that goes on: as the whole one, with dropout."""
    zero: tuple[str, ...] = (f"--dataset_sampler.type={HERE}.Drawn",)
    zero += (*UNITS, "--compute_config.use_zero", "--global_batch_size=8", "--checkpoint.save_type=deduped")
    for name, steps, more in (("p", 7, ()), ("u", 4, zero)):
        arguments = (*more, "--model.args.dropout", "0.2")
        whole = trained(folder, f"{name} whole", *arguments)
        expected = whole.model.state_dict(), whole.optimizer.state_dict()
        parallel_state.destroy_model_parallel()
        # No checkpoint is there.
        trained(folder, f"{name} parts", *arguments, f"--max_train_steps={steps}", "--checkpoint.resume_from=last")
        parallel_state.destroy_model_parallel()
        second = trained(folder, f"{name} parts", *arguments, "--checkpoint.resume_from=last")
        assert len(losses_of(second)) == len(losses_of(whole)) - steps
        assert losses_of(second) == losses_of(whole)[steps:]
        assert str((second.model.state_dict(), second.optimizer.state_dict())) == str(expected)
        for key, value in expected[0].items():
            assert not isinstance(value, torch.Tensor) or torch.equal(second.model.state_dict()[key], value)
        parallel_state.destroy_model_parallel()


def other_plan(rank: int, folder: Path) -> None:
    """A merged file goes on in another plan; other batches, ranks, and files of several steps are refused."""
    last, within = folder / "pipeline/last", folder / "pipeline/0001-0009"
    if rank == 0:
        Trainer.merge_checkpoint([str(within / f"{each}.ckpt") for each in range(2)], str(folder / "merged.ckpt"))
    weights, steps = one_process(1)
    # After the fourth of five steps of the second epoch.
    resumes = (*UNITS, f"--checkpoint.resume_from={folder / 'merged.ckpt'}")
    trainer = trained(folder, "other", *resumes)
    torch.testing.assert_close(losses_of(trainer), steps[9:])
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(parameter.detach(), weights[name])
    parallel_state.destroy_model_parallel()
    with pytest.raises(ValueError, match="is at another place in the data: its global_batch_size is 4, not 8: give 4"):
        trained(folder, "larger", *resumes, "--global_batch_size=8")
    parallel_state.destroy_model_parallel()
    with pytest.raises(ValueError, match="the val data of a unit have no batch: give more, or a smaller micro_batch"):
        trained(folder, "empty", *UNITS, "--dataset.val_args.size=0")
    if rank == 0:
        (last / "0.ckpt").unlink()
        (last / "0.ckpt").symlink_to("../0001-0009/0.ckpt")
    parallel_state.destroy_model_parallel()
    with pytest.raises(ValueError, match="ranks resume files of different steps"):
        trained(folder, "pipeline", "--checkpoint.resume_from=last")
    if rank == 0:
        (last / "2.ckpt").touch()
    parallel_state.destroy_model_parallel()
    with pytest.raises(ValueError, match=r"has the files of ranks \[0, 1, 2\], and this job has 2 ranks: merge"):
        trained(folder, "pipeline", "--checkpoint.resume_from=last")


def run_cases(rank: int, folder: Path) -> None:
    for case in (compared, resumed, other_plan):
        case(rank, folder)


def test_trainings_are_those_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(YAML)
    run_ranks(2, run_cases, tmp_path)
