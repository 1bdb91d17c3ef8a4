"""PipelineSFTTrainer: TRL's supervised fine-tuning over the stages of a pipeline."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from trl import SFTTrainer

from nxdpp.doors.transformers.evaluation import EvaluatingTrainer
from nxdpp.doors.trl.trainer import ScoredTrainer


class PipelineSFTTrainer(SFTTrainer, ScoredTrainer):  # type: ignore[misc]  # TRL's constructors differ from Trainer's
    """``trl.SFTTrainer`` over the stages of pipelines, and over data-parallel replicas of them.

    Data sets, chat templates, packing, completion masks and adapters are TRL's. The last stage computes the
    log-probabilities (B, T - 1) of the labels, and sends these; logits go to no other rank. Losses and the metrics
    ``mean_token_accuracy``, ``entropy`` and ``num_tokens`` equal ``SFTTrainer`` in one process whose
    ``per_device_train_batch_size`` is the one here times the number of replicas. ``eval_loss`` is the mean over the
    batches of each replica, as in TRL with several processes; there as here rows that fill the last batch of an epoch
    count, unless ``dataloader_drop_last=True`` drops it.

    Every rank makes it with the same arguments and calls the same methods, as for ``PipelineTrainer``.

    Args:
        model, args, data_collator, train_dataset, eval_dataset, processing_class: as for ``SFTTrainer``.
        callbacks, optimizers, optimizer_cls_and_kwargs, quantization_config, peft_config, formatting_func: likewise.
        compute_loss_func, compute_metrics, preprocess_logits_for_metrics: refused: they need logits.
        pipeline_parallel_size, num_microbatches, most_tokens, schedule: as for ``PipelineTrainer``.
        virtual_pipeline_size, partition, pipeline_arguments: likewise.

    Raises:
        ValueError: for an argument, or a field of ``args``, that cannot be honoured, with its name. Also as
            ``SFTTrainer`` and ``NxDPPModel`` do.
    """

    _library = SFTTrainer
    _fields = frozenset(
        {
            *("model_init_kwargs", "trust_remote_code", "router_aux_loss_coef", "chat_template_path"),
            *("dataset_text_field", "dataset_kwargs", "dataset_num_proc", "eos_token", "pad_token", "max_length"),
            *("truncation_mode", "shuffle_dataset", "packing", "packing_strategy", "eval_packing", "padding_free"),
            *("pad_to_multiple_of", "completion_only_loss", "assistant_only_loss", "loss_type"),
        }
    )
    _scores: tuple[str, ...] = ("log_probs", "entropy", "is_top1")
    prediction_step = EvaluatingTrainer.prediction_step

    def __init__(
        self,
        model: Any,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_loss_func: Any = None,
        compute_metrics: Any = None,
        callbacks: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: Any = None,
        preprocess_logits_for_metrics: Any = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Any = None,
        *,
        pipeline_parallel_size: int | None = None,
        num_microbatches: int | None = None,
        most_tokens: int | None = None,
        schedule: Any = None,
        virtual_pipeline_size: int = 1,
        partition: Any = "even",
        pipeline_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self._check(model, args, compute_loss_func, compute_metrics or preprocess_logits_for_metrics)
        self._pipeline = {
            "pipeline_parallel_size": pipeline_parallel_size,
            "num_microbatches": num_microbatches,
            "most_tokens": most_tokens,
            "schedule": schedule,
            "virtual_pipeline_size": virtual_pipeline_size,
            "partition": partition,
            "pipeline_arguments": pipeline_arguments,
        }
        self._start(args)
        super().__init__(
            model,
            args,
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            quantization_config=quantization_config,
            peft_config=peft_config,
            formatting_func=formatting_func,
        )
        self._cut_scored()

    def _loss_fn(self) -> Callable[..., torch.Tensor]:
        # compute_loss asks for a mask to count tokens, which is not done here.
        return lambda scores: self._differentiated({"attention_mask": scores["label_mask"]}, scores, self._items)
