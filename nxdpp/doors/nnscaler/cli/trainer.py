"""``Trainer``: the loop of a training whose parts are named by ``TrainerArgs``.

::

    seed ─ dummy sample ─▶ parallelize ─▶ data, optimizer, hooks ─ resume ─▶ epochs of steps
                                                                             step ─ validate ─ save
"""

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import length_hint
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from nxdpp.doors.nnscaler.cli import trainer_files
from nxdpp.doors.nnscaler.cli.aggregated_outputs import AggregatedOutputs, divisor_of, sums_over_units
from nxdpp.doors.nnscaler.cli.arguments import made, named_object
from nxdpp.doors.nnscaler.cli.train_hook import TrainHook
from nxdpp.doors.nnscaler.cli.trainer_args import TrainerArgs
from nxdpp.doors.nnscaler.end2end import sample_name
from nxdpp.doors.nnscaler.nested_values import map_values
from nxdpp.doors.nnscaler.parallelization import parallelize
from nxdpp.doors.nnscaler.start import init
from nxdpp.doors.random_states import all_random_states, set_all_random_states
from nxdpp.ranks import parallel_state

_LOGGER = logging.getLogger(__name__)


@dataclass
class TrainStatus:
    """Progress of a training: its finished steps, and the smallest loss at a checkpoint."""

    finished_train_steps: int = 0
    best_loss: float = math.inf


class Trainer:
    """Trains the model of ``train_args`` over the ranks of torchrun.

    Args:
        argv: a command line ``[-f FILE] [--name.of.argument VALUE ...]``; by default the program's own.
        train_args: the arguments, or nested dicts of them, in the place of ``argv``.

    Attributes:
        model, optimizer, lr_scheduler, dataset, dataloader, loggers: the objects of the training; data by stage.
        train_status: how far it is.
        sync_group: the ranks with the same place in all units.

    Raises ``ValueError`` for unknown, refused and wrong arguments.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any
    sync_group: ProcessGroup

    def __init__(
        self, argv: Sequence[str] | None = None, *, train_args: TrainerArgs | dict[str, Any] | None = None
    ) -> None:
        if argv is not None and train_args is not None:
            raise ValueError("argv and train_args are given: leave one of them out")
        if train_args is None:
            self.train_args = TrainerArgs.from_cli(sys.argv[1:] if argv is None else argv)
        else:
            self.train_args = train_args if isinstance(train_args, TrainerArgs) else TrainerArgs.from_dict(train_args)
        self.rank, self.world_size, self.local_rank = (
            int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
        )
        self.dataset: dict[str, Any] = {}
        self.dataloader: dict[str, Any] = {}
        self.train_status = TrainStatus()
        self.loggers: list[Any] = []
        self.random_states: Any = None, None
        self._hooks: list[Any] = []
        self._device = torch.device("cpu")

    def run(self) -> None:
        """Train, or only make the plan with ``run_mode="compile"``; collective over all ranks."""
        if self.rank == 0:
            logging.basicConfig(level=logging.INFO)
        try:
            self._set_up()
            if self.train_args.run_mode == "run":
                self._train()
        finally:
            for loader in self.dataloader.values():
                if hasattr(loader, "close"):
                    loader.close()
            self.tell("on_finalize")

    def tell(self, name: str, *args: Any) -> None:
        """Call the method ``name`` of each hook."""
        for hook in self._hooks:
            getattr(hook, name)(self, *args)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None, *, tag: str | None = None) -> None:
        """Give ``metrics`` to the loggers, by default for the last finished step."""
        for logger in self.loggers:
            logger.log_metrics(metrics, step or self.train_status.finished_train_steps, tag=tag)

    @classmethod
    def merge_checkpoint(cls, checkpoint_files: Sequence[str], output_file: str) -> None:
        """Merge the files of all ranks of a checkpoint into one, which any plan resumes; needs no ranks."""
        torch.save(trainer_files.merged(checkpoint_files), output_file)

    def _set_up(self) -> None:
        args = self.train_args
        init()
        args.init_env(self)
        self._dummy = self._converted(self._dummy_sample())
        parallel = parallelize(
            args.model_type,
            {sample_name(args.model_type): self._dummy},
            args.policy,
            args.plan_config,
            gen_savedir=args.gen_savedir,
            reuse=args.gen_reuse,
            instance_name=made(args.instance_name),
            load_module=args.run_mode == "run",
            module_fn=args.create_model,
            module_dtype=args.dtype("param"),
            broadcast_strategy=args.broadcast_strategy if dist.is_initialized() else "none",
        )
        if args.run_mode == "compile":
            return
        assert isinstance(parallel, type)
        self._device = parallel_state.local_device()
        self._dummy = self._converted(self._dummy)
        self.dataset = {stage: args.create_dataset(stage) for stage in ("train", "val", "test")}
        found = {stage: data for stage, data in self.dataset.items() if data is not None}
        self.dataloader = {stage: args.create_dataloader(stage, data) for stage, data in found.items()}
        for stage in self.dataloader.keys() - {"test"}:
            if length_hint(self.dataloader[stage], 1) == 0:
                raise ValueError(f"the {stage} data of a unit have no batch: give more, or a smaller micro_batch_size")
        self.total_train_steps_per_epoch = math.ceil(len(self.dataloader["train"]) / args.grad_accumulation_steps)
        whole = self.total_train_steps_per_epoch * args.max_epochs if args.max_epochs else sys.maxsize
        self.max_train_steps = min(whole, args.max_train_steps or sys.maxsize)
        self.sync_group = args.compute_config.get_sync_group()[1]
        self.model = parallel().to(self._device)
        self.optimizer = args.create_parallel_optimizer(self.model)
        if args.scaling_factor > 1:
            # Sums of half numbers do not overflow.
            self.optimizer.register_reducer_pre_hook(lambda reducer, grad: grad.div_(args.scaling_factor))
        self.lr_scheduler = args.create_lr_scheduler(self.optimizer)
        self.loggers = [named_object(each.type)(**made(each.args)) for each in args.log]
        own = [each for each in (self.optimizer, self.lr_scheduler) if isinstance(each, TrainHook)]
        self._hooks = [*own, args.create_hook()]
        for logger in self.loggers:
            logger.setup(args.to_dict())
        trainer_files.load(self)
        self.tell("after_setup")

    def _dummy_sample(self) -> Any:
        args = self.train_args
        if args.dummy_sample_gen_fn:
            return named_object(args.dummy_sample_gen_fn)(args)
        for sample in args.create_dataloader("train", args.create_dataset()):
            return sample
        raise ValueError(f"the training data of a unit have no batch of micro_batch_size={args.micro_batch_size}")

    def _converted(self, sample: Any) -> Any:
        """``sample`` on the device, in the dtype of inputs."""
        dtype = self.train_args.dtype("input")

        def converted(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return value.to(self._device, dtype if value.is_floating_point() else None)

        return map_values(converted, sample)

    def _train(self) -> None:
        status = self.train_status
        if status.finished_train_steps >= self.max_train_steps:
            _LOGGER.info("the training is at its end already: %s steps", status.finished_train_steps)
            return
        self.tell("on_train_start")
        done = status.finished_train_steps // self.total_train_steps_per_epoch
        for epoch in range(done, self.train_args.max_epochs or sys.maxsize):
            loader = self.dataloader["train"]
            shuffled = loader if hasattr(loader, "set_epoch") else getattr(loader, "sampler", None)
            if hasattr(shuffled, "set_epoch"):
                shuffled.set_epoch(epoch)  # type: ignore[union-attr]
            self.tell("on_epoch_start", epoch)
            self._train_epoch(epoch)
            self.tell("on_epoch_end", epoch)
            if status.finished_train_steps >= self.max_train_steps:
                break
        for logger in self.loggers:
            logger.finalize()
        self.tell("on_train_end")

    def _train_epoch(self, epoch: int) -> None:
        args, status, total = self.train_args, self.train_status, self.total_train_steps_per_epoch
        idx = done = status.finished_train_steps % total
        for idx, batches in enumerate(self._batches("train", done), done):
            if idx == total:
                break
            self.tell("on_step_start", epoch, idx)
            metrics, outputs = self._step(batches, is_last=idx + 1 == total)
            if self.rank == 0 and _is_due(args.log_progress_every_n_train_steps, status.finished_train_steps):
                line = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
                _LOGGER.info("epoch %s, step %s of %s: %s", epoch, idx + 1, total, line)
            self.tell("on_step_end", epoch, idx, metrics, outputs)
            self._validate_and_save(epoch, metrics["train_loss"], is_last=idx + 1 == total)
            if status.finished_train_steps >= self.max_train_steps and idx + 1 < total:
                return
        if status.finished_train_steps != (epoch + 1) * total or idx == total:
            word = "more" if idx == total else "fewer"
            raise RuntimeError(f"epoch {epoch} has {word} steps than {total}, by len() of the loader: give all in each")

    def _around(self, name: str, act: Callable[[], object]) -> None:
        self.tell(f"before_{name}")
        act()
        self.tell(f"after_{name}")

    def _step(self, batches: list[Any], is_last: bool) -> tuple[dict[str, float], AggregatedOutputs]:
        """Make a step of the optimizer; return its metrics and the sums over its micro-batches."""
        args, config, optimizer = self.train_args, self.train_args.optimizer, self.optimizer
        start, number = time.perf_counter(), len(batches)
        missing = args.grad_accumulation_steps - number
        self.model.train()
        self._around("zero_grad", optimizer.zero_grad)
        self.tell("on_train_step_start", batches)
        losses = self.model.train_step(batches + [self._dummy] * missing, [False] * number + [True] * missing)[:number]
        self.tell("on_train_step_end", losses)
        outputs = self._aggregated(losses)
        loss = outputs.loss_sum / divisor_of(config.loss_reduction, outputs)
        self.tell("after_aggregate_train_step_outputs", outputs, loss)
        self._around("sync_grad", optimizer.sync_shard_grad)
        optimizer.scale_grads(args.scaling_factor / divisor_of(config.grad_reduction, outputs))
        self.tell("before_gnorm_clip")
        gnorm = optimizer.clip_gnorm(config.clip_gnorm)
        self.tell("after_gnorm_clip", gnorm)
        rate = optimizer.param_groups[0]["lr"]
        self._around("optimizer_step", optimizer.step)
        # A checkpoint of the last step of an epoch has the rate of the next one.
        if self.lr_scheduler and args.lr_scheduler and (is_last or args.lr_scheduler.interval == "step"):
            self.lr_scheduler.step()
        self.train_status.finished_train_steps += 1
        seconds = time.perf_counter() - start
        metrics = {"train_loss": loss, "lr": float(rate), "gnorm": gnorm.item(), "train_wall": seconds, "loss": loss}
        self.tell("before_log_train_metrics", metrics, outputs)
        self.log_metrics(metrics, tag="train")
        return metrics, outputs

    def _validate_and_save(self, epoch: int, loss: float, is_last: bool) -> None:
        args, finished = self.train_args, self.train_status.finished_train_steps
        saves = finished >= self.max_train_steps or _is_due(args.checkpoint.every_n_train_steps, finished)
        saves |= is_last and _is_due(args.checkpoint.every_n_epochs, epoch + 1)
        saves &= not args.checkpoint.no_save
        validates = saves or _is_due(args.val_every_n_train_steps, finished)
        if validates or (is_last and _is_due(args.val_every_n_epochs, epoch + 1)):
            # The iterator of a loader draws a number, and a training is the same however often it is validated.
            before = all_random_states()
            loss = self._validate(loss)
            set_all_random_states(before)
        if saves:
            trainer_files.save(self, epoch, loss)

    def _validate(self, train_loss: float) -> float:
        """Return the mean loss of the validation data; without any, of the training step."""
        if "val" not in self.dataloader:
            return train_loss
        args, start, sums = self.train_args, time.perf_counter(), AggregatedOutputs()
        self.model.eval()
        self.tell("on_val_start")
        for batches in islice(self._batches("val"), args.max_val_steps or None):
            self.tell("on_val_step_start", batches)
            missing = args.grad_accumulation_steps - len(batches)
            losses = self.model.infer_step(batches + [self._dummy] * missing)[: len(batches)]
            self.tell("on_val_step_end", losses)
            outputs = self._aggregated(losses)
            self.tell("after_aggregate_val_step_outputs", outputs, outputs.loss_sum / outputs.num_batches)
            sums.loss_sum += outputs.loss_sum
            sums.num_batches += outputs.num_batches
        loss = sums.loss_sum / sums.num_batches
        self.tell("on_val_end", loss)
        metrics = {"val_loss": loss, "val_wall": time.perf_counter() - start}
        self.tell("before_log_val_metrics", metrics)
        self.log_metrics(metrics, tag="val")
        return loss

    def _batches(self, stage: str, skipped: int = 0) -> Iterator[list[Any]]:
        """Give the micro-batches of each step of an epoch, after ``skipped`` steps."""
        freq, now = self.train_args.grad_accumulation_steps, None
        if stage == "train":
            # Of a checkpoint: the generators make the order of the epoch, and the batches that it had.
            start, now = self.random_states
            if now:
                set_all_random_states(start if skipped else now)
            self.random_states = all_random_states(), None
        samples = iter(self.dataloader[stage])
        for _ in islice(samples, skipped * freq):
            pass
        if now and skipped:
            set_all_random_states(now)
        while batches := [self._converted(sample) for sample in islice(samples, freq)]:
            yield batches

    def _aggregated(self, losses: list[Any]) -> AggregatedOutputs:
        function: Callable[[list[Any], ProcessGroup], AggregatedOutputs] = sums_over_units
        if self.train_args.optimizer.aggregate_outputs_fn:
            function = named_object(self.train_args.optimizer.aggregate_outputs_fn)
        return function(losses, self.sync_group)


def _is_due(every: int | None, number: int) -> bool:
    return bool(every) and number % (every or 1) == 0
