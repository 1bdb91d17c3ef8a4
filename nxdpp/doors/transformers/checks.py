"""Checks of the arguments of ``PipelineTrainer`` itself, before anything is changed; none is collective."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_optimizer import is_optimizer_factory

from nxdpp.gradients.expert_parameters import is_of_experts
from nxdpp.pipeline.microbatches.token_budget import check_budget
from nxdpp.pipeline.model import NxDPPModel
from nxdpp.ranks import parallel_state

# Arguments of NxDPPModel that would change nothing here, or change the loss in a way that Trainer does not, by reason.
_REFUSED = {
    "give it to PipelineTrainer itself": "num_microbatches schedule virtual_pipeline_size partition",
    "the trainer sets it": "loss_normalization count_items_fn grad_scaler use_zero1_optimizer",
    "the last stage computes the model's own loss. Compute it in the model's forward": "loss_fn",
    "Trainer adds num_items_in_batch to the inputs": "input_names",
    "the batches of an optimizer step are its microbatches": "loss_over split_inputs_fn shared_inputs batch_dimension",
    "Trainer gets the loss of each batch on all ranks": "return_mb_loss broadcast_and_average_loss return_loss_on_cpu",
}
_NO_SPLIT = "Use num_microbatches=gradient_accumulation_steps, which splits no batch."


def check_model(model: Any, trainer: type[Trainer], loss_function: Any, of_library: type[Trainer] = Trainer) -> None:
    """Raise ``ValueError`` for a wrapped model, and for a ``compute_loss`` other than the trainer's ``of_library``."""
    if isinstance(model, NxDPPModel):
        raise ValueError("the model is wrapped already: give PipelineTrainer the model itself.")
    remedy = "the last stage computes the model's own loss. Compute it in the model's forward."
    if loss_function is not None:
        raise ValueError(f"PipelineTrainer cannot honour compute_loss_func: {remedy}")
    if trainer.compute_loss is not of_library.compute_loss:
        raise ValueError(f"{trainer.__name__} has a compute_loss of its own, which a pipeline does not call: {remedy}")


def check_scaling(is_scaled: bool | None, of_library: bool | None) -> None:
    """Raise ``ValueError`` for a ``loss_is_scaled_for_ga`` of a subclass, other than the one ``of_library``."""
    if is_scaled is not of_library:
        raise ValueError(
            f"PipelineTrainer cannot honour loss_is_scaled_for_ga={is_scaled}, which belongs to your "
            f"own compute_loss. Leave it at None, and return the scaled loss from the model's forward."
        )


def check_optimizer(
    class_and_options: tuple[type, Mapping[str, Any]] | None, given: object, args: TrainingArguments
) -> None:
    """Raise ``ValueError`` for a factory, which would need the whole model, and for an optimizer of whole tensors."""
    if args.fsdp and given is not None:
        raise ValueError(
            "PipelineTrainer cannot honour optimizers with fsdp: it shards the parameters that the optimizer has. Give "
            "optimizer_cls_and_kwargs=(torch.optim.AdamW, {...}), or optim."
        )
    if class_and_options is not None and is_optimizer_factory(class_and_options[0]):
        raise ValueError(
            "PipelineTrainer cannot honour optimizer_cls_and_kwargs with a factory, which takes the whole model: give "
            "a class of torch.optim."
        )


def check_pipeline_arguments(given: Mapping[str, Any] | None) -> None:
    """Raise ``ValueError`` for arguments of ``NxDPPModel`` that the trainer sets itself, has, or has no use for."""
    for reason, names in _REFUSED.items():
        if refused := ", ".join(name for name in names.split() if name in (given or {})):
            raise ValueError(f"PipelineTrainer cannot honour {refused} of pipeline_arguments: {reason}. Leave it out.")
    spec: Any = (given or {}).get("output_loss_value_spec")
    if isinstance(spec, tuple | list):
        spec = dict(enumerate(spec))
    marked: list[Any] = [place for place, is_loss in spec.items() if is_loss] if isinstance(spec, Mapping) else []
    if marked not in ([], ["loss"], [0]):
        raise ValueError(
            f"PipelineTrainer cannot honour output_loss_value_spec of pipeline_arguments with the loss at {marked}: "
            f"Trainer reads the loss as 'loss' of a dict, or as the first value of a tuple. Return it there."
        )


def parts_of_batch(num_microbatches: int | None, accumulated: int, most_tokens: int | None = None) -> int:
    """Return the number of microbatches of each of the ``accumulated`` batches. Raises ``ValueError``."""
    if most_tokens is not None:
        check_budget(most_tokens, 1)
        if num_microbatches is not None:
            raise ValueError(
                f"num_microbatches={num_microbatches} and most_tokens={most_tokens} exclude each other: the budget of "
                f"tokens decides into how many microbatches a batch is split. Leave one of them out."
            )
    if num_microbatches is None:
        return 1
    if isinstance(num_microbatches, bool) or not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise ValueError(f"num_microbatches={num_microbatches!r} must be a whole number of at least 1.")
    if num_microbatches % accumulated:
        raise ValueError(
            f"num_microbatches={num_microbatches} must be a multiple of gradient_accumulation_steps={accumulated}: "
            f"each batch is split into equally many."
        )
    return num_microbatches // accumulated


def check_split(splits: bool, model: Any, is_divided: bool) -> None:
    """Raise ``ValueError`` if the losses of parts of a batch do not add up to the loss of the batch.

    ``splits`` says that batches have parts, ``is_divided`` that the model divides its loss by ``num_items_in_batch``.
    """
    if not splits:
        return
    name = type(model).__name__
    if not is_divided:
        raise ValueError(
            f"num_microbatches or most_tokens splits batches, and the loss of {name} is not divided by "
            f"num_items_in_batch: parts of a batch would have other means. {_NO_SPLIT}"
        )
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise ValueError(
            f"num_microbatches or most_tokens splits batches, and {name} with output_router_logits=True adds a loss "
            f"that is a mean over a batch. {_NO_SPLIT}"
        )


def check_context() -> None:
    """Raise ``ValueError`` in a job whose ranks share sequences: evaluations would take parts of the logits for all."""
    if (ranks := parallel_state.get_context_model_parallel_size()) > 1:
        raise ValueError(
            f"initialize_model_parallel was called with context_parallel_size={ranks}, which PipelineTrainer does not "
            f"divide sequences over: train NxDPPModel(nxdpp.context_parallelize(model), ...) in a loop of your own, or "
            f"leave the size out."
        )


def check_experts(model: nn.Module) -> None:
    """Raise ``ValueError`` for a ``model`` without divided experts in a job whose ranks share experts."""
    ranks = parallel_state.get_expert_model_parallel_size()
    if ranks > 1 and not any(map(is_of_experts, model.parameters())):
        raise ValueError(
            f"initialize_model_parallel was called with expert_model_parallel_size={ranks}, and {type(model).__name__} "
            f"has no divided experts: give PipelineTrainer nxdpp.expert_parallelize(model), or leave the size out."
        )
