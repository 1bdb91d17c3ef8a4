"""PipelineTrainer: ``transformers.Trainer`` over pipelines and their data-parallel replicas.

::

    Trainer                                      PipelineTrainer
    the batches of an optimizer step  ─────▶     the microbatches of one step of the pipeline
    training_step of the first batch  ─────▶     runs them all, and returns its loss
    training_step of the others       ─────▶     returns the loss of each
"""

from collections.abc import Container, Iterator, Mapping
from typing import Any, ClassVar, cast

import torch
from accelerate.utils.memory import clear_device_cache
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Seq2SeqTrainer, Trainer, TrainingArguments
from transformers.trainer_pt_utils import nested_gather
from transformers.trainer_utils import TrainOutput

from nxdpp.doors.transformers import checks
from nxdpp.doors.transformers.arguments import check_arguments, check_replicas, compile_options
from nxdpp.doors.transformers.control import ControlledTrainer
from nxdpp.doors.transformers.data import check_divided, grouped_over_replicas, replica_loader
from nxdpp.doors.transformers.data_randomness import DataRandomness
from nxdpp.doors.transformers.evaluation import EvaluatingTrainer
from nxdpp.doors.transformers.last_batch import LastBatch, NotedLast, weights_of, with_own_labels
from nxdpp.doors.transformers.layout import initialize, keep_own_parameters, number_of_parameters
from nxdpp.doors.transformers.saving import SavingTrainer
from nxdpp.doors.transformers.sharding import check_layers, kept_from_accelerate, shard
from nxdpp.doors.transformers.step_batches import StepBatches, joined, parts_within, split_rows
from nxdpp.gradients.followed_optimizers import followed_by_optimizers
from nxdpp.pipeline.layer_compilation import apply_compile
from nxdpp.pipeline.model import NxDPPModel
from nxdpp.ranks import parallel_state


class PipelineTrainer(SavingTrainer, EvaluatingTrainer, ControlledTrainer):
    """``transformers.Trainer`` over the stages of pipelines, and over data-parallel replicas of them.

    Every rank makes it with the same arguments, and calls the same methods: all are collective over all ranks. Losses,
    evaluations and the norm of gradients equal ``Trainer`` in one process. Its ``per_device_train_batch_size``
    is the one here times the number of replicas. Rank 0 logs, and reports to callbacks such as TensorBoard's.

    The batches of an optimizer step, ``gradient_accumulation_steps`` of them, are the microbatches of the pipeline.
    ``num_microbatches`` splits them further.

    Args:
        model, args, data_collator, train_dataset, eval_dataset, processing_class, model_init: as for ``Trainer``.
        compute_metrics, callbacks, optimizers, optimizer_cls_and_kwargs, preprocess_logits_for_metrics: likewise.
        compute_loss_func: refused: the last stage computes the model's own loss.
        pipeline_parallel_size: stages' ranks of a pipeline. By default all ranks, or as many as
            ``parallel_state.initialize_model_parallel`` was called with.
        num_microbatches: microbatches of an optimizer step, a multiple of ``gradient_accumulation_steps``. Each batch
            is split by rows into equal numbers of them. By default a batch is one.
        most_tokens: the most tokens of a microbatch, padding included: a batch is split by rows into as few as that
            takes, in place of ``num_microbatches``.
        schedule, virtual_pipeline_size, partition: as for ``NxDPPModel``.
        pipeline_arguments: other arguments of ``NxDPPModel`` by name.

    Attributes:
        model: the whole model. Other ranks' parameters are on the meta device.
        pipelined: the ``NxDPPModel`` that wraps it.

    Raises:
        ValueError: for an argument, or a field of ``args``, that cannot be honoured, with its name. Nothing is changed
            then. Also as ``NxDPPModel`` does.
    """

    # Of a subclass over another library's trainer: that trainer, and its fields of ``args``.
    _library: ClassVar[type[Trainer]] = Trainer
    _fields: ClassVar[Container[str]] = ()
    # Whether rows that fill the last batch of an epoch are cut off.
    _cuts_last: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Any = None,
        compute_loss_func: Any = None,
        compute_metrics: Any = None,
        callbacks: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Any = None,
        *,
        pipeline_parallel_size: int | None = None,
        num_microbatches: int | None = None,
        most_tokens: int | None = None,
        schedule: Any = None,
        virtual_pipeline_size: int = 1,
        partition: Any = "even",
        pipeline_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        args = TrainingArguments("tmp_trainer") if args is None else args
        check_arguments(args, self._fields)
        checks.check_model(model, type(self), compute_loss_func, self._library)
        checks.check_scaling(self.loss_is_scaled_for_ga, self._library.loss_is_scaled_for_ga)
        checks.check_optimizer(optimizer_cls_and_kwargs, optimizers[0], args)
        checks.check_pipeline_arguments(pipeline_arguments)
        self._parts = checks.parts_of_batch(num_microbatches, args.gradient_accumulation_steps, most_tokens)
        self._most_tokens = most_tokens
        initialize(args, pipeline_parallel_size)
        checks.check_context()
        self._replicas = parallel_state.get_data_parallel_size()
        check_replicas(args, self._replicas)
        self._pipeline_arguments = {
            "num_microbatches": self._parts * args.gradient_accumulation_steps,
            "schedule": schedule,
            "virtual_pipeline_size": virtual_pipeline_size,
            "partition": partition,
            **(pipeline_arguments or {}),
        }
        self._step = StepBatches()
        self._last = NotedLast()
        # For each batch of the present step its rows, if it does not divide over replicas.
        self._rows: list[LastBatch | None] = []
        self._randomness = DataRandomness()
        vars(self)["get_batch_samples"] = self._begin_step
        self._is_checked = False
        super().__init__(
            model,
            args,
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class,
            model_init,
            None,
            compute_metrics,
            callbacks,
            optimizers,
            optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics,
        )
        if (generation_config := getattr(args, "generation_config", None)) is not None:
            vars(self.model)["generation_config"] = Seq2SeqTrainer.load_generation_config(generation_config)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train as ``Trainer.train``.

        Raises:
            ValueError: for a ``trial``: a search would cut a model again. Also for an epoch or a training that a
                callback ends inside of an optimizer step.
            RuntimeError: on all ranks, for flags of ``TrainerControl`` that callbacks have set on some ranks only.
        """
        if trial is not None:
            raise ValueError("PipelineTrainer cannot honour trial: start a training for each choice of arguments.")
        checks.check_scaling(self.loss_is_scaled_for_ga, self._library.loss_is_scaled_for_ga)
        self._step.clear()
        with self._randomness.of_call():
            return super().train(resume_from_checkpoint, ignore_keys_for_eval=ignore_keys_for_eval)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ``ValueError``: ranks would search independently."""
        raise ValueError("PipelineTrainer has no hyperparameter_search: start a training for each choice of arguments.")

    def call_model_init(self, trial: Any = None) -> Any:
        """Return a new model of ``model_init``, after it is cut."""
        model = super().call_model_init(trial)
        if self._is_checked:
            self._wrap(model)
        return model

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator. Its data loaders give each rank the batches of its replica."""
        with kept_from_accelerate(self.args):
            super().create_accelerator_and_postprocess()
        # One step of the pipeline accumulates, so none is without its average over replicas.
        self.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed

        def prepare(loader: DataLoader[Any], *_: Any, **__: Any) -> DataLoader[Any]:
            return replica_loader(self.accelerator, loader, seed, self._randomness)

        vars(self.accelerator)["prepare_data_loader"] = prepare

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Make the optimizer of this rank's parameters, in the groups of ``Trainer``."""
        made: Optimizer = super().create_optimizer(self.pipelined.local_module)
        return made

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Run all batches of the optimizer step with its first one, and return the loss of ``inputs``.

        Raises ``ValueError`` for ``inputs`` that are not the next batch of the step, or that a subclass has changed.
        """
        return self._step.loss_of(inputs, lambda batches: self._train_batches(batches, num_items_in_batch))

    def set_initial_training_values(self, args: TrainingArguments, dataloader: DataLoader[Any]) -> Any:
        """Return the lengths of the training.

        Raises ``ValueError`` if the schedule cannot run its last, short step, or if each replica would take all rows.
        """
        check_divided(dataloader)
        values: Any = super().set_initial_training_values(args, dataloader)
        steps_in_epoch, accumulated = values[5], args.gradient_accumulation_steps
        if short := steps_in_epoch % accumulated:
            try:
                self.pipelined.steps.schedule.of(short * self._parts, train=True)
            except ValueError as error:
                raise ValueError(
                    f"the batches of an epoch, {steps_in_epoch}, are no multiple of gradient_accumulation_steps="
                    f"{accumulated}, and its last optimizer step has {short}: {error} Or choose "
                    f"gradient_accumulation_steps such that it divides {steps_in_epoch}."
                ) from error
        return values

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return grouped_over_replicas(super()._get_train_sampler(train_dataset))

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        return grouped_over_replicas(super()._get_eval_sampler(eval_dataset))

    def get_tp_size(self) -> int:
        """Return the number of ranks of a replica, which all take the same batch."""
        return int(self.args.world_size) // self._replicas

    def floating_point_ops(self, inputs: dict[str, Any]) -> Any:
        """Return the operations of ``inputs`` in the whole model."""
        return super().floating_point_ops(self._own_rows(inputs)) * self._flos_factor

    def _own_rows(self, inputs: Any) -> Any:
        """Return ``inputs`` without rows that only fill a last batch."""
        last = self._last.of(inputs)
        return inputs if last is None else last.own(inputs)

    def store_flos(self) -> None:
        """Add the operations since the last call. ``Trainer`` sums over all ranks, so each replica is counted once."""
        before = self.state.total_flos
        super().store_flos()
        self.state.total_flos = before + (self.state.total_flos - before) / self.get_tp_size()

    def _begin_step(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        # It replaces get_batch_samples on the object, so that the batches of a subclass's get_batch_samples run.
        with self._randomness.fetching():
            own = epoch_iterator
            if self._cuts_last:
                own = self._last.begin_step(epoch_iterator, self._parts, cast(nn.Module, self.model))
            batches, items = type(self).get_batch_samples(self, own, num_batches, device)
        self._step.begin(batches)
        return batches, items

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        batch_samples = [with_own_labels(batch, self._last.of(batch)) for batch in batch_samples]
        items = super()._get_num_items_in_batch(batch_samples, device)
        # Trainer divides by the ranks of a replica, but it has summed over them only with this field.
        if items is None or self.args.average_tokens_across_devices:
            return items
        return items * self.get_tp_size()

    def _train_batches(self, batches: list[Any], items: Any) -> list[torch.Tensor]:
        self.pipelined.train()
        if callable(to_training := getattr(self.optimizer, "train", None)):
            to_training()
        prepared = [self._prepare_inputs(batch) for batch in batches]
        with self.compute_loss_context_manager(), self.accelerator.autocast():
            self._rows = [self._last.of(batch) for batch in batches]
            losses = self._run(prepared, items)
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        return losses

    def _run(self, batches: list[dict[str, Any]], items: Any) -> list[torch.Tensor]:
        """Run forward and backward of ``batches``; return the share of each in the loss of the step."""
        parts = [self._split(batch) for batch in batches]
        microbatches = [part for of_batch in parts for part in of_batch]
        microbatches = self.with_items(microbatches, items)
        is_divided = "num_items_in_batch" in microbatches[0]
        checks.check_split(self._splits, self.model, is_divided)
        # Trainer does not divide the loss of a model that takes num_items_in_batch and ignores it.
        are_summed = items is not None and self.model_accepts_loss_kwargs and not is_divided
        scales = [1.0] * len(microbatches)
        if is_divided:
            of_parts = [rows for rows, of_batch in zip(self._rows, parts, strict=True) for _ in of_batch]
            microbatches = [with_own_labels(part, rows) for part, rows in zip(microbatches, of_parts, strict=True)]
        else:
            scales = weights_of(batches, self._rows)
        # The pipeline takes the mean of the losses of microbatches.
        scales = [scale * len(microbatches) if are_summed else scale for scale in scales]

        def scaled(number: int, loss: torch.Tensor) -> torch.Tensor:
            return loss * scales[number]

        losses = self.pipelined.steps.train_microbatches(microbatches, None if set(scales) == {1.0} else scaled)
        shares = [loss * scale / len(losses) for loss, scale in zip(losses, scales, strict=True)]
        return joined(shares, [len(of_batch) for of_batch in parts])

    @property
    def _splits(self) -> bool:
        """Batches are split into several microbatches, at least some of them."""
        return self._parts > 1 or self._most_tokens is not None

    def _split(self, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        parts = self._parts if self._most_tokens is None else parts_within(batch, self._most_tokens)
        return split_rows(batch, parts, self._most_tokens)

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> Any:
        # Steps that are not logged yet have the loss of this replica.
        self._tr_loss = nested_gather(self._tr_loss, self.args.parallel_mode).mean()
        return super()._finalize_training(trial, num_train_samples, start_time)  # type: ignore[no-untyped-call]

    def _wrap(self, model: nn.Module) -> None:
        whole = number_of_parameters(model)
        with followed_by_optimizers(model):
            self.pipelined = NxDPPModel(model, **self._pipeline_arguments)
        if options := compile_options(self.args):
            apply_compile(self.pipelined, **options)
        shard(self.pipelined, self.args)
        # Trainer counts the operations of parameters: tied ones of several ranks twice, and a part of divided ones.
        counted = model.num_parameters(exclude_embeddings=True) if isinstance(model, PreTrainedModel) else whole
        self._flos_factor = whole / max(counted, 1)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        # Trainer has just made the optimizer, maybe by a subclass's create_optimizer over self.model.
        keep_own_parameters(self.optimizer, model if self.model is None else self.model)
        return self.pipelined

    def _validate_args(self) -> None:
        super()._validate_args()
        checks.check_split(self._splits, self.model, self.model_accepts_loss_kwargs)
        model = cast(nn.Module, self.model)
        checks.check_experts(model)
        check_layers(self.args, model, self._pipeline_arguments.get("transformer_layer_cls"))
        self._cut()

    def _cut(self) -> None:
        # From here on nothing is refused any more: the other stages' parameters can be freed.
        self._is_checked = True
        model = cast(nn.Module, self.model)
        self._wrap(model)
        self._move_model_to_device(model, self.args.device)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if self._is_checked:
            self.pipelined.move_model_to_device(device)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(self._own_rows(inputs))  # type: ignore[no-untyped-call]
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self.get_tp_size()

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return self.pipelined.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        return self.pipelined.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm
