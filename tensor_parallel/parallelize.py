"""Tensor parallelism for an unmodified Hugging Face model, by the plan that its configuration carries."""

import warnings
from collections.abc import Mapping
from typing import TypeVar

from torch import nn
from transformers import PreTrainedModel

from nxdpp.parallel_layers import parallel_state
from nxdpp.parallel_layers.replaced_parameters import check_no_optimizer_holds, watch_replaced
from nxdpp.tensor_parallel.apply import apply_plan
from nxdpp.tensor_parallel.compared_types import COMPARED
from nxdpp.tensor_parallel.loss import divide_loss
from nxdpp.tensor_parallel.own_plans import PLANS, plan_of
from nxdpp.tensor_parallel.plan import check_plan, expanded

M = TypeVar("M", bound=nn.Module)


def tensor_parallelize(model: M, plan: Mapping[str, str] | None = None, *, sequence_parallel: bool = False) -> M:
    """Divide the linear layers and embeddings of ``model`` over the tensor-parallel ranks, in place; not collective.

    Call it after ``initialize_model_parallel`` and before ``NxDPPModel``. All ranks of a tensor group give the same
    model. It keeps its values: each rank keeps its part of them. A model on the meta device, or from ``deferred_init``,
    stays without memory; its initial weights are those of one process. ``load_pretrained`` and ``save_pretrained`` of
    the wrapped model read and write the whole tensors under their own names.

    The head's logits are then this rank's part ``(B, T, V / ranks)`` of the vocabulary, where the loss is the causal
    one of transformers; it is computed by ``parallel_cross_entropy``.

    Args:
        model: of transformers, not wrapped yet.
        plan: styles of transformers by name pattern, such as ``{"model.layers.*.mlp.up_proj": "colwise"}``, in place of
            the model's own ``tp_plan``. The head's logits are then gathered, and nothing compares the model with one
            process: do that for a plan of your own.
        sequence_parallel: not implemented yet.

    Returns:
        ``model`` itself.

    Raises:
        TypeError: for a model that is wrapped already, and a plan of another form.
        ValueError: for a type whose plan was not compared with one process (``docs/tensor_models.md``), and for sizes
            that do not divide, with the numbers. Nothing is changed then.
        NotImplementedError: for ``sequence_parallel=True``.
        RuntimeError: before ``initialize_model_parallel``, and for parameters that an optimizer holds: it would go on
            with the whole ones.
    """
    if not isinstance(model, nn.Module) or hasattr(model, "replace_local_tensors"):
        raise TypeError(
            f"tensor_parallelize takes a model before it is wrapped, not a {type(model).__name__}: "
            f"NxDPPModel(tensor_parallelize(model), ...)"
        )
    parallel_state.get_tensor_model_parallel_size()
    if any(getattr(parameter, "tensor_model_parallel", False) for parameter in model.parameters()):
        raise ValueError("the model has tensor-parallel parameters already: call tensor_parallelize once")
    if plan is None:
        return _by_own_plan(model, sequence_parallel)
    check_plan(plan)
    if unmatched := expanded(plan, model)[2]:
        raise ValueError(
            f"the plan names {', '.join(unmatched)}, which {type(model).__name__} does not have: correct it"
        )
    return parallelize(model, plan, sequence_parallel)


def parallelize(model: M, plan: Mapping[str, str], sequence_parallel: bool = False, parallel_loss: bool = False) -> M:
    """Divide ``model`` by ``plan``; ``parallel_loss`` leaves the logits divided where the loss can take them."""
    if sequence_parallel:
        raise NotImplementedError("sequence_parallel=True is not implemented for this model: leave it out")
    if parallel_state.get_tensor_model_parallel_size() == 1:
        return model
    before = dict(model.named_parameters())
    check_no_optimizer_holds(before, "Make the optimizer after NxDPPModel(tensor_parallelize(model), ...).")
    for told in apply_plan(model, plan):
        warnings.warn(told, stacklevel=3)
    kept = {id(parameter) for parameter in model.parameters()}
    watch_replaced({name: parameter for name, parameter in before.items() if id(parameter) not in kept})
    if parallel_loss and isinstance(model, PreTrainedModel):
        divide_loss(model)
    return model


def _by_own_plan(model: M, sequence_parallel: bool) -> M:
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    plan = plan_of(model)
    if not plan:
        raise ValueError(
            f"{type(model).__name__} has no tp_plan: give plan=, a dict of name patterns and styles, such as "
            f'{{"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}}'
        )
    if model_type not in PLANS and type(model).__name__ not in COMPARED:
        raise ValueError(
            f"the tp_plan of {type(model).__name__} was not compared with one process, or differs from it "
            f"(docs/tensor_models.md lists the types). Give plan=model.tp_plan to use it unseen, and compare loss and "
            f"gradients yourself."
        )
    return parallelize(model, plan, sequence_parallel, parallel_loss=True)
