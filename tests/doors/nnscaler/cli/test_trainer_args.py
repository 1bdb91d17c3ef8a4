"""Arguments of the trainer: read, verified and refused; no processes."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nxdpp.nnscaler import ComputeConfig
from nxdpp.nnscaler.cli import Trainer
from nxdpp.nnscaler.cli.train_hook import TrainHook
from nxdpp.nnscaler.cli.trainer_args import CheckpointConfig, HookMapConfig, ModelConfig, OptimizerConfig, TrainerArgs
from tests.doors.nnscaler.cli.test_trainer import YAML
from tests.doors.nnscaler.cli.trained import MLP, SimpleDataset, count_steps


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "train.yaml"
    path.write_text(YAML)
    return str(path)


def test_the_command_line_replaces_values_of_the_file(file: str) -> None:
    argv = ["-f", file, "--model.args.dim", "32", "--max-epochs=4", "--optimizer.args.betas", "(0.5, 0.9)"]
    args = TrainerArgs.from_cli([*argv, "--checkpoint.no_save", "--compute_config.use_zero=true", "--precision=bf16"])

    assert args.model.args == {"dim": 32, "nlayers": 4}
    assert (args.max_epochs, args.checkpoint.no_save, args.compute_config.use_zero) == (4, True, True)
    assert args.optimizer.args == {"lr": 0.01, "betas": (0.5, 0.9)}
    assert (args.global_batch_size, args.grad_accumulation_steps, args.gen_reuse) == (4, 2, "match")
    assert args.dtype("input") is args.dtype("buffer") is torch.bfloat16
    assert args.model_type is MLP
    assert isinstance(args.create_dataset(), SimpleDataset)
    assert args.create_dataset("test") is None
    assert args.to_dict()["model"] == {"type": "tests.doors.nnscaler.cli.trained.MLP", "args": args.model.args}


REFUSED = {
    "--max_epoch=2": "there is no argument max_epoch: the trainer has init_module, compute_config",
    "--model.kwargs.dim=2": "there is no argument model.kwargs: model has type, args",
    "--tracing_from_weights=a.pt": r"tracing_from_weights='a.pt' is refused: a trace reads no values",
    "--model.parallel_modules=[1]": r"model.parallel_modules='\[1\]' is refused: the trainer trains one end-to-end",
    "--max_epochs=two": "max_epochs='two' must be of type int | None",
    "--checkpoint.no_save=no": "checkpoint.no_save='no' must be of type bool",
    "--log.0.type=A": r"--log.0.type: log is \[\{.* of which the command line changes no part",
    "--model.args.dim=$(vars.dim)": r"refers to another argument, which this trainer does not follow: give the value",
    "--dataset.type=a.$!{vars.name}": "refers to another argument, which this trainer does not follow: give the value",
    "--optimizer.clip_gnorm": "optimizer.clip_gnorm=True must be of type float",
    "--micro_batch_size=0": "micro_batch_size=0 must be above 0",
    "--val_every_n_epochs=-1": "val_every_n_epochs=-1 must be above 0; leave it out for no number",
    "--checkpoint.keep_last_n_checkpoints=-1": "checkpoint.keep_last_n_checkpoints=-1 must be above 0; None for no",
    "--checkpoint.symlink_best_and_last=false": "symlink_best_and_last=False is refused: last and best are links",
    "--compute_config.pas_config.pipeline_nmicros=4": "pas_config.pipeline_nmicros=4 must equal grad_accumulation_st",
    "more": "'more' belongs to no argument: give --name VALUE or --name=VALUE",
    "--compute_config.use_end2end=false": "compute_config is needed, with use_end2end=True",
    "--max_epochs=0": "max_epochs or max_train_steps is needed",
    "--global_batch_size=5": "global_batch_size=5 must be micro_batch_size=2 times 1 units times grad_accumulation",
    "--optimizer.grad_reduction=max": "optimizer.grad_reduction must be one of mean, sum, per-token-mean, not 'max'",
    "--optimizer.loss_reduction=per-token-mean": "per-token-mean needs optimizer.aggregate_outputs_fn",
    "--checkpoint.every_n_epochs=1": "every_n_epochs and every_n_train_steps are given: leave one of them out",
    "--checkpoint.save_type=merged": "checkpoint.save_type must be one of sharded, deduped, not 'merged'",
    "--precision.param=bf16": "precision.buffer must be one of bf16, not 'none'",
    "--run_mode=test": "run_mode must be one of compile, run, not 'test'",
}


@pytest.mark.parametrize("argument", REFUSED)
def test_a_wrong_argument_is_refused_in_a_sentence(file: str, argument: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[argument]):
        Trainer(["-f", file, argument])


def test_names_that_lead_nowhere_are_refused_when_they_are_used(file: str) -> None:
    argv = ["-f", file, "--model.type=tests.nowhere.MLP", "--checkpoint.resume_from=gone"]
    args = TrainerArgs.from_cli([*argv, "--hook.on_step=builtins.print", "--dataloader.train_args.batch_size=2"])
    with pytest.raises(ValueError, match=r"'tests.nowhere.MLP' is not the full name of a class or function"):
        _ = args.model_type
    with pytest.raises(ValueError, match=r"checkpoint.resume_from: gone does not exist"):
        args.checkpoint.path_to_resume()
    with pytest.raises(ValueError, match=r"hook must be one of after_setup, .*, not 'on_step'"):
        args.create_hook()
    with pytest.raises(ValueError, match="dataloader has batch_size: give micro_batch_size in its place"):
        args.create_dataloader("train", args.create_dataset())


class Noted(TrainHook):
    """A hook with the arguments of its configuration."""

    def __init__(self, args: dict[str, Any]) -> None:
        self.args = args


def test_arguments_are_objects_too(tmp_path: Path) -> None:
    config = ComputeConfig(1, 2, use_end2end=True)
    parts: dict[str, Any] = {
        "dataset": {"type": SimpleDataset},
        "max_epochs": 1,
        "hook": {"type": Noted, "args": {"a": 1}},
    }
    model, optimizer = ModelConfig(MLP), OptimizerConfig(torch.optim.Adam)
    args = TrainerArgs.from_dict({"compute_config": config, "model": model, "optimizer": optimizer, **parts})

    assert (args.scaling_factor, args.global_batch_size, args.checkpoint.every_n_epochs) == (2, 2, 1)
    assert args.compute_config is config
    hook = args.create_hook()
    assert hook.args == {"a": 1}
    hook.on_train_start(None)
    args.hook = HookMapConfig(on_step_end=count_steps)
    assert args.create_hook().on_step_end is count_steps
    assert args.to_dict()["hook"]["on_step_end"] == "tests.doors.nnscaler.cli.trained.count_steps"
    args.model.args = {"a": object(), "b": [torch.float16, partial(max, 1)], "c": ({"x"}, None, TrainHook)}
    b, c = ["torch.float16", "functools.partial"], (["'x'"], None, "nxdpp.doors.nnscaler.cli.train_hook.TrainHook")
    assert args.to_dict()["model"]["args"] == {"a": "builtins.object", "b": b, "c": c}
    assert CheckpointConfig(resume_from="best").path_to_resume() is None
    with pytest.raises(ValueError, match="argv and train_args are given: leave one of them out"):
        Trainer([], train_args=args)


def test_compile_makes_the_plan_without_ranks(file: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the training data of a unit have no batch of micro_batch_size=2"):
        Trainer(["-f", file, "--dataset.train_args.size=1", "--dataloader.train_args.drop_last=true"]).run()
    trainer = Trainer(["-f", file, "--run_mode=compile", f"--gen_savedir={tmp_path}"])
    trainer.run()

    assert trainer.train_args.gen_reuse == "moo"
    assert len(list(tmp_path.rglob("plan.json"))) == 1
    # A plan is of one policy, and of the sizes of a step.
    again = ["-f", file, "--run_mode=compile", f"--gen_savedir={tmp_path}", "--gen_reuse=match"]
    Trainer(again).run()
    for changed in ("--pas_policy=autodist", "--micro_batch_size=1", "--model.args.dropout=0.1"):
        with pytest.raises(RuntimeError, match="has a plan that does not fit: its user_config is"):
            Trainer([*again, changed, "--global_batch_size=0", "--grad_accumulation_steps=2"]).run()
    args = TrainerArgs.from_cli(["-f", file, "--pas_policy=autodist", "--compute_config.pas_config={}"])
    assert args.plan_config.pas_config == {"update_freq": 2}
