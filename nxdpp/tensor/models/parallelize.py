"""Tensor parallelism for an unmodified Hugging Face model, by the plan that its configuration carries."""

import warnings
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from torch import nn
from transformers import PreTrainedModel

from nxdpp.gradients.expert_parameters import is_of_experts
from nxdpp.gradients.replaced_parameters import check_no_optimizer_holds, watch_replaced
from nxdpp.ranks import parallel_state
from nxdpp.tensor.models.adapters import adapted_plan, base_of
from nxdpp.tensor.models.apply import apply_plan
from nxdpp.tensor.models.compared_types import is_compared
from nxdpp.tensor.models.loss import divide_loss
from nxdpp.tensor.models.own_plans import check_added, has_compared_plan, plan_of, plan_of_transformers
from nxdpp.tensor.models.plan import check_plan, expanded
from nxdpp.tensor.models.sequence import check_layers, check_type, divide_sequence

M = TypeVar("M", bound=nn.Module)


def tensor_parallelize(
    model: M,
    plan: Mapping[str, str] | None = None,
    *,
    sequence_parallel: bool = False,
    pad_heads: bool = False,
    gather_logits: bool = False,
) -> M:
    """Divide the linear layers and embeddings of ``model`` over the tensor-parallel ranks, in place; not collective.

    Call it after ``initialize_model_parallel`` and before ``NxDPPModel``. All ranks of a tensor group give the same
    model. It keeps its values: each rank keeps its part of them. A model on the meta device, or from ``deferred_init``,
    stays without memory; its initial weights equal one process's. ``load_pretrained`` and ``save_pretrained`` of
    the wrapped model read and write the whole tensors under their own names.

    The head's logits are then this rank's part ``(B, T, V / ranks)`` of the vocabulary, where the loss is the causal
    one of transformers; it is computed by ``parallel_cross_entropy``.

    Args:
        model: of transformers, not wrapped yet. In a ``PeftModel`` of LoRA the low-rank matrices are divided too.
        plan: styles of transformers by name pattern, such as ``{"model.layers.*.mlp.up_proj": "colwise"}``, in place of
            the model's own ``tp_plan``. The head's logits are then gathered. A plan that ``check_tensor_parallel`` has
            not compared with one process gives a warning.
        sequence_parallel: each rank has a part of the sequence between the linear layers of the layers, and a pipeline
            sends parts. The length ``T`` is a multiple of the number of ranks. Hidden states of layers inside are parts
            ``(B, T / ranks, H)``. A loop without a pipeline calls ``allreduce_sequence_parallel_gradients``.
        pad_heads: adds heads of zeros where the heads of keys and values do not divide (``docs/tensor_models.md`` lists
            the types). They compute and hold memory for nothing; the model's numbers and files stay the same.
            Not together with ``sequence_parallel``.
        gather_logits: each rank has all logits ``(B, T, V)``, as ``generate`` needs them. The loss then takes them
            all: more memory, and a message of their size.

    Returns:
        ``model`` itself.

    Raises:
        TypeError: for a model that is wrapped already, and a malformed plan.
        ValueError: for a type whose plan was not compared with one process (``docs/tensor_models.md``), and for sizes
            that do not divide, with the numbers. So for ``sequence_parallel=True`` of a type that was not compared,
            with the module that prevents it. Nothing is changed then.
        RuntimeError: before ``initialize_model_parallel``, and for parameters that an optimizer holds: it would keep
            stepping the whole ones.
    """
    if sequence_parallel and pad_heads:
        raise ValueError("pad_heads=True was not compared with sequence_parallel=True: leave one of them out")
    if sequence_parallel and base_of(model) is not model:
        raise ValueError(
            "adapters were not compared with sequence_parallel=True: merge_and_unload() them, or leave it out"
        )
    if sequence_parallel and any(map(is_of_experts, model.parameters())):
        raise ValueError(
            "expert_parallelize was not compared with sequence_parallel=True: leave one of them out, or make the "
            "tensor-parallel ranks pipeline stages"
        )
    if sequence_parallel and parallel_state.get_context_model_parallel_size() > 1:
        raise ValueError("context_parallel_size was not compared with sequence_parallel=True: leave one of them out")
    chosen = checked_plan(model, plan)
    if plan is None:
        if not has_compared_plan(model, chosen):
            raise ValueError(
                f"{type(base_of(model)).__name__}: its tp_plan was not compared with one process "
                f"(docs/tensor_models.md lists the types). Call check_tensor_parallel(small_model, inputs) before, or "
                f"give a dict plan= of your own"
            )
        if sequence_parallel:
            check_type(model, chosen)
    result = parallelize(model, chosen, sequence_parallel, plan is None and not gather_logits, pad_heads)
    if plan is not None and parallel_state.get_tensor_model_parallel_size() > 1 and not is_compared(type(model), plan):
        warnings.warn(
            f"{type(model).__name__}: this plan was not compared with one process, and a plan may give other numbers. "
            f"Call check_tensor_parallel(small_model, inputs, plan) before, with a small model of this class",
            stacklevel=2,
        )
    return result


def parallelize(
    model: M,
    plan: Mapping[str, str],
    sequence_parallel: bool = False,
    parallel_loss: bool = False,
    pad_heads: bool = False,
) -> M:
    """Divide ``model`` by ``plan``; ``parallel_loss`` leaves the logits divided where the loss can take them."""
    if parallel_state.get_tensor_model_parallel_size() == 1:
        return model
    divided = check_layers(model, plan) if sequence_parallel else None
    before = dict(model.named_parameters())
    check_no_optimizer_holds(before, "Make the optimizer after NxDPPModel(tensor_parallelize(model), ...).")
    for told in apply_plan(model, plan, pad_heads):
        warnings.warn(told, stacklevel=3)
    kept = {id(parameter) for parameter in model.parameters()}
    watch_replaced({name: parameter for name, parameter in before.items() if id(parameter) not in kept})
    base = base_of(model)
    refuse_methods(model, parallel_loss and isinstance(base, PreTrainedModel) and divide_loss(base))
    if divided is not None:
        divide_sequence(model, divided)
    return model


def checked_plan(model: nn.Module, plan: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return ``plan``, by default the type's plan; raise for models and plans that cannot be divided."""
    if not isinstance(model, nn.Module) or hasattr(model, "replace_local_tensors"):
        raise TypeError(
            f"tensor_parallelize takes a model before it is wrapped, not a {type(model).__name__}: "
            f"NxDPPModel(tensor_parallelize(model), ...)"
        )
    parallel_state.get_tensor_model_parallel_size()
    if any(getattr(parameter, "tensor_model_parallel", False) for parameter in model.parameters()):
        raise ValueError("the model has tensor-parallel parameters already: call tensor_parallelize once")
    base = base_of(model)
    if plan is None:
        plan = plan_of(base)
        if not plan:
            raise ValueError(
                f"{type(base).__name__} has no tp_plan: give plan=, a dict of name patterns and styles, such as "
                f'{{"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}}'
            )
        return plan if base is model else adapted_plan(model, plan)
    check_plan(plan)
    # Plans of transformers are for all configurations of a type.
    theirs = plan_of_transformers(model)
    if unmatched := [name for name in expanded(plan, model)[2] if name not in theirs]:
        raise ValueError(
            f"the plan names {', '.join(unmatched)}, which {type(model).__name__} does not have: correct it"
        )
    check_added(model, plan)
    return plan


def refuse_methods(model: nn.Module, divides_logits: bool) -> None:
    """Make ``save_pretrained`` and ``resize_token_embeddings`` of ``model``, and of models in it, raise.

    With ``divides_logits`` its ``generate`` raises too. All raise ``RuntimeError`` with what to call instead.
    """
    refused = {"save_pretrained": _save_pretrained, "resize_token_embeddings": _resize_token_embeddings}
    for module in model.modules():
        for name, refusal in refused.items():
            if callable(getattr(type(module), name, None)):
                vars(module)[name] = refusal
    if divides_logits and callable(getattr(type(model), "generate", None)):
        vars(model)["generate"] = _generate


def _save_pretrained(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "this model's own save_pretrained would write this rank's parts of the divided parameters: call "
        "nxdpp.save_pretrained(NxDPPModel(model, ...), directory) on every rank."
    )


def _resize_token_embeddings(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "resize_token_embeddings would give each tensor-parallel rank a whole vocabulary of its own: call it before "
        "tensor_parallelize(model)."
    )


def _generate(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "generate would choose tokens from this rank's part of the vocabulary: the head returns divided logits for the "
        "loss. Give tensor_parallelize(model, gather_logits=True), whose head returns all of them."
    )
