"""Common part of TRL's trainers over a pipeline: their loss runs on the last stage, their metrics on all ranks.

::

    last stage    scores of a microbatch ─▶ compute_loss of TRL ─▶ backward
    all ranks     scores (B, T - 1) of all microbatches, after the step ─▶ compute_loss of TRL ─▶ metrics, loss

TRL's ``compute_loss`` calls the model itself. Here it is given a function that returns the scores that are there.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from peft import PeftModel
from torch import nn

from nxdpp.doors.transformers import checks
from nxdpp.doors.transformers.arguments import check_arguments
from nxdpp.doors.transformers.evaluation import Prediction, Windows, of_replicas
from nxdpp.doors.transformers.layout import initialize
from nxdpp.doors.transformers.trainer import PipelineTrainer
from nxdpp.doors.trl.scores import return_scores, scores_of
from nxdpp.ranks import parallel_state

Scores = dict[str, Any]

REFUSED = {
    "activation_offloading": "its hooks are for a model in one process. Set gradient_checkpointing=True.",
    "sync_ref_model": "its callback copies whole models. Leave it out.",
}
"""Fields of TRL's configurations that are refused, with the reason and the remedy."""


class ScoredTrainer(PipelineTrainer):
    """A ``PipelineTrainer`` below a trainer of TRL in the order of classes."""

    # A batch of pairs has its rows twice, and TRL measures rows itself.
    _cuts_last = False

    _scores: tuple[str, ...]
    _pipeline: Mapping[str, Any]
    _items: Any = None
    _metrics: dict[str, Any]
    _total_train_tokens: float
    # TRL's trainers of text generation set these two.
    _is_vision_dataset: bool = False
    aux_loss_enabled: bool = False

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **{**named, **self._pipeline})

    @classmethod
    def _check(cls, model: Any, args: Any, loss_function: Any = None, metrics: Any = None) -> None:
        """Raise ``ValueError`` for what cannot be honoured, before TRL's constructor changes anything."""
        checks.check_model(model, cls, loss_function, cls._library)
        if metrics is not None:
            raise ValueError(
                f"{cls.__name__} cannot honour compute_metrics and preprocess_logits_for_metrics: logits stay on the "
                f"last stage. It logs TRL's own metrics; PipelineTrainer.predict returns logits."
            )
        if args is None:
            return
        check_arguments(args, cls._fields)
        for name, reason in REFUSED.items():
            if getattr(args, name, False):
                raise ValueError(f"{cls.__name__} cannot honour {name}=True: {reason}")
        if (args.gradient_checkpointing_kwargs or {}).get("selective"):
            raise ValueError(
                f"{cls.__name__} cannot honour gradient_checkpointing_kwargs={{'selective': True}}: it changes the "
                f"model that is cut. Leave it out."
            )

    def _start(self, args: Any) -> None:
        """Start model parallelism before TRL's constructor loads a model: only one rank tells of it."""
        if args is not None:
            initialize(args, self._pipeline["pipeline_parallel_size"])

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, which leaves a reference model of TRL where it is: it is cut later."""
        super().create_accelerator_and_postprocess()
        vars(self.accelerator)["prepare_model"] = lambda model, **_: model

    def _cut(self) -> None:
        """Do nothing: TRL's constructor reads the whole model after this one."""

    def _cut_scored(self) -> None:
        """Cut the model, at the end of the constructor; raise ``ValueError`` for what TRL's has found out."""
        if self._is_vision_dataset:
            raise ValueError(f"{type(self).__name__} takes text, and the data set has images: use PipelineTrainer.")
        if isinstance(self.model, PeftModel) and self.model.active_peft_config.is_prompt_learning:
            raise ValueError(
                f"{type(self).__name__} cannot train {self.model.active_peft_config.peft_type.value}, whose virtual "
                f"tokens are no inputs of the stages. Use LoRA."
            )
        if self.aux_loss_enabled and self._splits:
            raise ValueError(
                "num_microbatches splits batches, and the auxiliary loss of the experts is a mean over a batch. Use "
                "num_microbatches=gradient_accumulation_steps; or router_aux_loss_coef=0.0."
            )
        self._return_scores()
        self._pipeline_arguments["loss_fn"] = self._loss_fn()
        super()._cut()

    def _return_scores(self) -> None:
        """Let the model return what TRL's loss reads."""
        return_scores(cast(nn.Module, self.model), self._scores, self.aux_loss_enabled)

    def _loss_fn(self) -> Callable[..., torch.Tensor]:
        """Return the function of the scores of a microbatch and of its inputs that the last stage differentiates."""
        raise NotImplementedError

    def _inputs_of(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs of the model and of ``loss_fn`` for ``batch``."""
        return dict(batch)

    def _run(self, batches: list[dict[str, Any]], items: Any) -> list[torch.Tensor]:
        self._items = items
        parts = [self._split(self._inputs_of(batch)) for batch in batches]
        microbatches = [part for of_batch in parts for part in of_batch]
        count = 1 if items is None else len(microbatches)
        scores = iter(self.pipelined.steps.train_microbatches(microbatches, lambda _, loss: loss * count, outputs=True))
        of_batches = [_joined([next(scores) for _ in of_batch]) for of_batch in parts]
        losses = self._measured(batches, of_batches, items)
        return losses if items is not None else [loss / len(losses) for loss in losses]

    def _predict(
        self, batches: list[dict[str, Any]], loss_only: bool, ignore_keys: list[str] | None
    ) -> list[Prediction]:
        if not loss_only:
            raise ValueError(
                f"{type(self).__name__} has no predictions: logits stay on the last stage. evaluate() returns the loss "
                f"and TRL's metrics; PipelineTrainer.predict returns logits."
            )
        prepared = [self._prepare_inputs(batch) for batch in batches]
        with self.compute_loss_context_manager(), self.accelerator.autocast():
            scores = self.pipelined.steps.eval_microbatches(list(map(self._inputs_of, prepared)), outputs=True)
            count = len(prepared) - self._is_filled_up()
            losses = self._measured(prepared[:count], scores[:count], None)
            losses += [self._measured_last(*each) for each in zip(prepared[count:], scores[count:], strict=True)]
            return [(loss, None, None) for loss in losses]

    def _is_filled_up(self) -> bool:
        """Return whether the present window ends with a batch that has rows twice, for equal batches of replicas."""
        windows = self._windows
        return (
            windows is not None
            and windows.is_last
            and windows.remainder > 0
            and parallel_state.get_data_parallel_size() > 1
        )

    def _measured(
        self, batches: Sequence[Mapping[str, Any]], scores: Sequence[Scores], items: Any
    ) -> list[torch.Tensor]:
        """Return the loss of each batch, and note the metrics that TRL computes of all replicas; collective."""
        with torch.no_grad(), self._gathering(of_replicas):
            return [self._loss(dict(b), s, items).detach() for b, s in zip(batches, scores, strict=True)]

    def _measured_last(self, batch: Mapping[str, Any], scores: Scores) -> torch.Tensor:
        """Return the loss of a batch that was filled up, and note the metrics of the other rows; collective.

        Without padding a batch is one row, whose metrics count all.
        """
        remainder, rows = cast(Windows, self._windows).remainder, self.args.eval_batch_size
        own = remainder - parallel_state.get_data_parallel_rank() * rows

        def masked(value: torch.Tensor) -> torch.Tensor:
            # Pairs have their chosen rows above the rejected ones.
            if not value.ndim or len(value) % rows:
                return value
            return value * (torch.arange(len(value), device=value.device) % rows < own)[:, None]

        masks = {name: masked(batch[name]) for name in ("completion_mask",) if name in batch}
        with torch.no_grad():
            loss = self._differentiated(dict(batch), scores, None)
            # Numbers are sums over the rows of a replica.
            with self._gathering(lambda each: of_replicas(each)[: remainder if each.ndim else None]):
                self._loss({**batch, **masks}, {name: masked(each) for name, each in scores.items()}, None)
        return loss

    def _differentiated(self, inputs: dict[str, Any], scores: Scores, items: Any) -> torch.Tensor:
        """Return TRL's loss of a microbatch, without metrics."""
        metrics, tokens = self._metrics, self._total_train_tokens
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        nothing = torch.zeros((), device="cpu")
        try:
            with self._gathering(lambda _: nothing):
                return self._loss(inputs, scores, items)
        finally:
            self._metrics, self._total_train_tokens = metrics, tokens

    def _loss(self, inputs: dict[str, Any], scores: Scores, items: Any) -> torch.Tensor:
        output = self._output_of(scores)
        # Its annotations ask for a module.
        compute: Any = self.compute_loss
        loss: torch.Tensor = compute(lambda **_: output, inputs, num_items_in_batch=items)
        return loss

    def _output_of(self, scores: Scores) -> Any:
        """The output of a model, as TRL's code reads it."""
        return scores_of(scores)

    @contextmanager
    def _gathering(self, gather: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """Let TRL's metrics gather with ``gather`` in the block: accelerate would count each rank of a pipeline."""
        names = ("gather", "gather_for_metrics")
        vars(self.accelerator).update(dict.fromkeys(names, gather))
        try:
            yield
        finally:
            for name in names:
                del vars(self.accelerator)[name]


def _joined(parts: list[Scores]) -> Scores:
    """Return the scores of a batch (B, T - 1) from the scores of its parts (b, T - 1)."""
    if len(parts) == 1:
        return parts[0]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
