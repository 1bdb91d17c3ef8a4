"""PipelineDPOTrainer: TRL's direct preference optimization over the stages of a pipeline.

::

    batches ─▶ reference: an evaluation of the same stages ─▶ ref_chosen_logps, ref_rejected_logps (B,)
            ─▶ policy: a training step of pairs, chosen rows above rejected ones ─▶ scores (2B, T - 1) ─▶ TRL's loss

The reference is a model of its own, cut as the policy; or the policy itself with its adapters off, or with the adapter
``ref``; or the policy before its first step, with ``precompute_ref_log_probs``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch.utils.data import DataLoader
from trl import DPOTrainer

from nxdpp.counted import counted
from nxdpp.doors.transformers.evaluation import EvaluatingTrainer, Prediction, of_replicas
from nxdpp.doors.transformers.sharding import shard
from nxdpp.doors.trl.scores import return_scores, scores_of
from nxdpp.doors.trl.trainer import ScoredTrainer
from nxdpp.ground.other_names import ACTIVE_ADAPTER, DISABLE_ADAPTERS
from nxdpp.pipeline.model import NxDPPModel
from nxdpp.ranks import parallel_state

_OF_REFERENCE = _CHOSEN, _REJECTED = "ref_chosen_logps", "ref_rejected_logps"


class PipelineDPOTrainer(DPOTrainer, ScoredTrainer):  # type: ignore[misc]  # TRL's constructors differ from Trainer's
    """``trl.DPOTrainer`` over the stages of pipelines, and over data-parallel replicas of them.

    The losses, their weights and the divergences are TRL's own, and so are the metrics (``rewards/...``, ``logps/...``,
    ``logits/...``). A microbatch is a batch of whole pairs, chosen and rejected rows (2B, T). The last stage computes
    the log-probabilities (2B, T - 1), and sends these. All equals ``DPOTrainer`` in one process whose
    ``per_device_train_batch_size`` is the one here times the number of replicas. Pairs that fill the last batch of an
    epoch over replicas count, as in TRL: ``dataloader_drop_last=True`` drops it.

    Every rank makes it with the same arguments and calls the same methods, as for ``PipelineTrainer``.

    Args:
        model, ref_model, args, data_collator, train_dataset, eval_dataset, processing_class: as for ``DPOTrainer``.
        callbacks, optimizers, quantization_config, peft_config: likewise.
        compute_metrics: refused: it needs logits.
        pipeline_parallel_size, schedule, virtual_pipeline_size, partition, pipeline_arguments: as for
            ``PipelineTrainer``. A reference model is cut alike.

    Raises:
        ValueError: for an argument, or a field of ``args``, that cannot be honoured, with its name. Also as
            ``DPOTrainer`` and ``NxDPPModel`` do.
    """

    _library = DPOTrainer
    _fields = frozenset(
        {
            *("model_init_kwargs", "trust_remote_code", "router_aux_loss_coef", "disable_dropout"),
            *("dataset_num_proc", "pad_token", "max_length", "truncation_mode", "padding_free", "pad_to_multiple_of"),
            *("precompute_ref_log_probs", "precompute_ref_batch_size", "loss_type", "loss_weights", "ld_alpha"),
            *("f_divergence_type", "f_alpha_divergence_coef", "label_smoothing", "beta", "use_weighting"),
            *("discopop_tau", "ref_model_mixup_alpha", "ref_model_sync_steps"),
        }
    )
    _scores: tuple[str, ...] = ("log_probs", "entropy", "mean_logits", "is_top1")
    precompute_ref_logps: bool
    _is_complete = False
    _reference: NxDPPModel | None = None
    prediction_step = EvaluatingTrainer.prediction_step

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Any = None,
        callbacks: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        *,
        pipeline_parallel_size: int | None = None,
        schedule: Any = None,
        virtual_pipeline_size: int = 1,
        partition: Any = "even",
        pipeline_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self._check(model, args, metrics=compute_metrics)
        self._pipeline = {
            "pipeline_parallel_size": pipeline_parallel_size,
            "schedule": schedule,
            "virtual_pipeline_size": virtual_pipeline_size,
            "partition": partition,
            "pipeline_arguments": pipeline_arguments,
        }
        self._start(args)
        super().__init__(
            model,
            ref_model,
            args,
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )
        if self.use_weighting:
            self._scores = (*self._scores, "log_sum_sq_probs")
        self._cut_scored()
        if self.ref_model is not None:
            return_scores(self.ref_model, ("log_probs",))
            arguments = {name: value for name, value in self._pipeline_arguments.items() if name != "loss_fn"}
            self._reference = NxDPPModel(self.ref_model, **arguments)
            shard(self._reference, self.args)
            self._reference.move_model_to_device(self.args.device)
        self._is_complete = True
        if self.precompute_ref_logps:
            self._precompute_all()

    def _loss_fn(self) -> Callable[..., torch.Tensor]:
        def loss(
            scores: dict[str, Any],
            completion_mask: torch.Tensor,
            ref_chosen_logps: torch.Tensor,
            ref_rejected_logps: torch.Tensor,
        ) -> torch.Tensor:
            inputs = {
                # The scores are there, and tokens are not counted here: the two are only read.
                **dict.fromkeys(("input_ids", "attention_mask", "completion_mask"), completion_mask),
                _CHOSEN: ref_chosen_logps,
                _REJECTED: ref_rejected_logps,
            }
            return self._differentiated(inputs, scores, None)

        return loss

    def _inputs_of(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {**batch, "labels": batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)}

    def _run(self, batches: list[dict[str, Any]], items: Any) -> list[torch.Tensor]:
        # TRL's loss is the mean of each batch, also where a collator gives labels to count.
        return super()._run(self._with_references(batches), None)

    def _predict(
        self, batches: list[dict[str, Any]], loss_only: bool, ignore_keys: list[str] | None
    ) -> list[Prediction]:
        if loss_only:
            prepared = [self._prepare_inputs(batch) for batch in batches]
            with self.compute_loss_context_manager(), self.accelerator.autocast():
                batches = self._with_references(prepared)
        return super()._predict(batches, loss_only, ignore_keys)

    def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
        # The batches have the log-probabilities of the reference, however they were computed.
        given = self.precompute_ref_logps
        self.precompute_ref_logps = True
        try:
            return super()._compute_loss(model, inputs, return_outputs)
        finally:
            self.precompute_ref_logps = given

    def _with_references(self, batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return ``batches`` with the log-probabilities (B,) of the reference; collective.

        Raises ``ValueError`` for a batch without the precomputed ones: the policy may be trained, and is no reference.
        """
        if not self.precompute_ref_logps:
            return self._with_computed_references(batches)
        if not all(batch.keys() >= {*_OF_REFERENCE} for batch in batches):
            raise ValueError(
                f"precompute_ref_log_probs=True, and a batch has no {_CHOSEN} and {_REJECTED}: let data_collator keep "
                f"both columns."
            )
        return list(batches)

    def _with_computed_references(self, batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return ``batches`` with the log-probabilities (B,) that the reference has now; collective."""
        batches = [{key: value for key, value in batch.items() if key not in _OF_REFERENCE} for batch in batches]
        inputs = [self._inputs_of(batch) for batch in batches]
        for each in inputs:
            del each["completion_mask"]
        reference = self.pipelined if self._reference is None else self._reference
        with self._without_adapters():
            scores = reference.steps.eval_microbatches(inputs, outputs=True)
        logps = [self._logps(batch, own) for batch, own in zip(batches, scores, strict=True)]
        return [
            {**batch, _CHOSEN: chosen, _REJECTED: rejected}
            for batch, (chosen, rejected) in zip(batches, logps, strict=True)
        ]

    def _logps(self, batch: Mapping[str, Any], scores: dict[str, Any]) -> Any:
        """Return TRL's sums of ``scores`` for the chosen rows and the rejected rows, each (B,)."""
        output = scores_of(scores)
        # What compute_ref_log_probs reads of a trainer whose reference is a model of its own.
        trainer = SimpleNamespace(
            accelerator=self.accelerator,
            args=self.args,
            ld_alpha=self.ld_alpha,
            model=SimpleNamespace(is_gradient_checkpointing=False),
            ref_model=output,
        )
        return DPOTrainer.compute_ref_log_probs(trainer, lambda **_: output, batch)

    @contextmanager
    def _without_adapters(self) -> Iterator[None]:
        """Run the policy as its own reference in the block, as TRL does, but without new ``requires_grad``."""
        if self._reference is not None or not isinstance(self.model, PeftModel):
            yield
            return
        is_copied = "ref" in self.model.peft_config
        attribute, value = (ACTIVE_ADAPTER, ["ref"]) if is_copied else (DISABLE_ADAPTERS, True)
        layers = [each for each in self.model.modules() if isinstance(each, BaseTunerLayer | AuxiliaryTrainingWrapper)]
        before = [attribute.of(layer) for layer in layers]
        try:
            for layer in layers:
                attribute.set(layer, value)
            yield
        finally:
            for layer, own in zip(layers, before, strict=True):
                attribute.set(layer, own)

    def _precompute_all(self) -> None:
        args: Any = self.args
        train = args.precompute_ref_batch_size or args.per_device_train_batch_size
        self.train_dataset = self._precompute_ref_logps(self.train_dataset, "train", train)
        evaluation = args.precompute_ref_batch_size or args.per_device_eval_batch_size
        if isinstance(self.eval_dataset, dict):
            for name, dataset in self.eval_dataset.items():
                self.eval_dataset[name] = self._precompute_ref_logps(dataset, name, evaluation)
        elif self.eval_dataset is not None:
            self.eval_dataset = self._precompute_ref_logps(self.eval_dataset, "eval", evaluation)

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """Return ``dataset`` with columns of the reference's log-probabilities; collective, and without a cache."""
        if not self._is_complete:
            # TRL's constructor calls it before the model is cut.
            return dataset
        if not isinstance(dataset, Dataset):
            raise ValueError(
                f"precompute_ref_log_probs=True needs a data set with a length, and {name} is a "
                f"{type(dataset).__name__}. Give a ref_model, or use a Dataset."
            )
        step = batch_size * parallel_state.get_data_parallel_size()
        if not self.accelerator.even_batches and len(dataset) % step:
            raise ValueError(
                f"precompute_ref_log_probs=True with even_batches=False needs full batches on all replicas: {name} has "
                f"{counted(len(dataset), 'row')}, no multiple of {step}."
            )
        loader = self.accelerator.prepare(DataLoader(dataset, batch_size, collate_fn=self.data_collator))
        batches = iter(loader)
        found: list[torch.Tensor] = []
        with self.compute_loss_context_manager(), self.accelerator.autocast():
            while window := list(islice(batches, 2 * parallel_state.get_pipeline_model_parallel_size())):
                known = self._with_computed_references([self._prepare_inputs(batch) for batch in window])
                found += [torch.stack([of_replicas(each[key]) for key in _OF_REFERENCE]) for each in known]
        chosen, rejected = torch.cat(found, dim=1)[:, : len(dataset)].cpu().numpy()
        return dataset.add_column(_CHOSEN, chosen).add_column(_REJECTED, rejected)
