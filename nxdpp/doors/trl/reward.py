"""PipelineRewardTrainer: TRL's training of a reward model over the stages of a pipeline.

::

    last stage    rewards (2B, 1) of a microbatch, chosen rows above rejected ones ─▶ compute_loss of TRL ─▶ backward
    all ranks     rewards of the pairs of all replicas, after the step ─▶ compute_loss of TRL ─▶ metrics, loss
"""

from collections.abc import Callable, Mapping, Sequence
from types import MethodType, SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from trl import RewardTrainer

from nxdpp.doors.transformers.evaluation import EvaluatingTrainer, Windows, of_replicas
from nxdpp.doors.trl.scores import causal_model
from nxdpp.doors.trl.trainer import ScoredTrainer, Scores

_MARGIN = "margin"


class PipelineRewardTrainer(RewardTrainer, ScoredTrainer):  # type: ignore[misc]  # TRL's constructors differ from Trainer's
    """``trl.RewardTrainer`` over the stages of pipelines, and over data-parallel replicas of them.

    Data sets, margins, the centering of rewards and adapters are TRL's. A microbatch is a batch of whole pairs, chosen
    and rejected rows (2B, T). Losses and the metrics ``accuracy``, ``margin`` and ``..._reward`` equal
    ``RewardTrainer`` in one process whose ``per_device_train_batch_size`` is the one here times the number of replicas.
    Pairs that fill the last batch of an epoch over replicas count, as in TRL: ``dataloader_drop_last=True`` drops it.

    Every rank makes it with the same arguments and calls the same methods, as for ``PipelineTrainer``.

    Args:
        model, args, data_collator, train_dataset, eval_dataset, processing_class: as for ``RewardTrainer``.
        callbacks, optimizers, optimizer_cls_and_kwargs, quantization_config, peft_config: likewise.
        compute_metrics, preprocess_logits_for_metrics: refused: rewards of a batch are no predictions here.
        pipeline_parallel_size, schedule, virtual_pipeline_size, partition, pipeline_arguments: as for
            ``PipelineTrainer``.

    Raises:
        ValueError: for an argument, or a field of ``args``, that cannot be honoured, with its name. Also as
            ``RewardTrainer`` and ``NxDPPModel`` do.
    """

    _library = RewardTrainer
    _fields = frozenset(
        {
            *("model_init_kwargs", "trust_remote_code", "disable_dropout", "chat_template_path", "dataset_num_proc"),
            *("eos_token", "pad_token", "max_length", "pad_to_multiple_of", "center_rewards_coefficient"),
        }
    )
    prediction_step = EvaluatingTrainer.prediction_step

    def __init__(
        self,
        model: Any,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Any = None,
        callbacks: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: Any = None,
        preprocess_logits_for_metrics: Any = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        *,
        pipeline_parallel_size: int | None = None,
        schedule: Any = None,
        virtual_pipeline_size: int = 1,
        partition: Any = "even",
        pipeline_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self._check(model, args, metrics=compute_metrics or preprocess_logits_for_metrics)
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
        )
        self._cut_scored()

    def _loss_fn(self) -> Callable[..., torch.Tensor]:
        def loss(scores: Scores, margin: torch.Tensor | None = None) -> torch.Tensor:
            # compute_loss asks for a mask to count tokens, which is not done here.
            inputs = {"attention_mask": scores["logits"].detach(), _MARGIN: margin}
            return self._differentiated({n: each for n, each in inputs.items() if each is not None}, scores, None)

        return loss

    def _return_scores(self) -> None:
        return_rewards(cast(nn.Module, self.model))

    def _run(self, batches: list[dict[str, Any]], items: Any) -> list[torch.Tensor]:
        return super()._run(batches, None)

    def _measured(
        self, batches: Sequence[Mapping[str, Any]], scores: Sequence[Scores], items: Any
    ) -> list[torch.Tensor]:
        return [self._of_pairs(*each) for each in zip(batches, scores, strict=True)]

    def _measured_last(self, batch: Mapping[str, Any], scores: Scores) -> torch.Tensor:
        return self._of_pairs(batch, scores, cast(Windows, self._windows).remainder)

    def _of_pairs(self, batch: Mapping[str, Any], scores: Scores, count: int | None = None) -> torch.Tensor:
        """Return the loss of the first ``count`` pairs of all replicas, and note TRL's metrics of them; collective."""
        halves = [of_replicas(half)[:count] for half in scores["logits"].chunk(2)]
        # TRL adds up the mask to count tokens.
        inputs = {"attention_mask": of_replicas(batch["attention_mask"].sum())}
        if _MARGIN in batch:
            inputs[_MARGIN] = of_replicas(batch[_MARGIN])[:count]
        with torch.no_grad(), self._gathering(lambda each: each):
            return self._loss(inputs, {"logits": torch.cat(halves)}, None).detach()

    def _output_of(self, scores: Scores) -> Any:
        return SimpleNamespace(**scores)


def return_rewards(model: nn.Module) -> None:
    """Let ``forward`` of ``model``, or of the model in its adapters, return a dict of ``logits`` (B, 1) alone.

    The last hidden states of all rows would else go to each rank. Names of inputs and parameters stay.
    """
    inner = causal_model(model)
    plain = inner.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        return {"logits": plain(*args, **kwargs).logits}

    # The names of inputs are the model's own.
    forward.__wrapped__ = type(inner).forward  # type: ignore[attr-defined]
    vars(inner)["forward"] = MethodType(forward, inner)
