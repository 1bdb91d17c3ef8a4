"""Expert parallelism for an unmodified model, by the plan that its type carries, or by the shapes of its experts."""

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from nxdpp.experts.interface import OURS, check_implementation, choose_implementation
from nxdpp.experts.layer import DividedExperts
from nxdpp.experts.shared import find_shared
from nxdpp.gradients.expert_parameters import is_of_experts, mark_experts
from nxdpp.gradients.optimizer.partial_steps import refuse_partial_steps
from nxdpp.gradients.replaced_parameters import check_no_optimizer_holds, watch_replaced
from nxdpp.ground.torch_names import PARAMETERS
from nxdpp.initialization.allocation import with_type_of
from nxdpp.initialization.parts import PartOf, mark_part
from nxdpp.pipeline.local.refused_models import refuse_other_wrappers
from nxdpp.ranks import parallel_state
from nxdpp.tensor.models.adapters import base_of
from nxdpp.tensor.models.modules import override
from nxdpp.tensor.models.parallelize import refuse_methods
from nxdpp.tensor.models.plan import expanded
from nxdpp.tensor.tensor_attributes import is_tensor_parallel

M = TypeVar("M", bound=nn.Module)

# Styles of transformers: of a parameter that has one expert after the other, and of the module that has these.
_EXPERTS, _MODULE = "grouped_gemm", "ep_dispatch_experts"
# What transformers' types call the number of experts of a module, which its forward reads.
_COUNTS = ("num_experts", "num_local_experts")
# Names of parameters by which experts are known where a type has no plan.
_SHAPED = ("gate_up_proj", "up_proj", "down_proj")


def expert_parallelize(model: M, plan: Mapping[str, str] | None = None, *, ep_implementation: str = OURS) -> M:
    """Divide the experts of ``model`` over the ranks of the expert group, in place; not collective.

    Call it after ``initialize_model_parallel(expert_model_parallel_size=...)`` and before ``NxDPPModel``, with the same
    model on all ranks. Each rank keeps its experts, with their values, under their names: consecutive ones along
    dimension 0. Each data-parallel rank trains rows of its own, and tokens go to the ranks of their experts. A model on
    the meta device, or from ``deferred_init``, stays without memory; its initial weights equal one process's.

    Losses and gradients are those of one process, to rounding. Gradients of experts are averaged over the ranks with
    the same experts. Tensor-parallel ranks all compute the same experts: ``tensor_parallelize``, called afterwards,
    divides the other layers. All ranks of an expert group run the same steps, evaluations too, with as many
    microbatches.

    Args:
        model: not wrapped yet. Experts are modules with one parameter for all experts, such as ``gate_up_proj`` and
            ``down_proj`` of shape ``(experts, ...)``, and a ``forward`` of hidden states ``(N, H)``, chosen experts
            ``(N, K)`` and their weights ``(N, K)``. A parameter may have several rows for each expert, one expert after
            the other, if the module's ``num_experts`` has the number of experts.
        plan: ``"grouped_gemm"`` for the name patterns of such parameters, as in
            ``{"layers.*.moe.experts.weight": "grouped_gemm"}``, in place of the model's own ``ep_plan``. Where they are
            parameters of modules inside, ``"ep_dispatch_experts"`` names the module of that ``forward``. The name
            pattern of a type without a plan is not needed where its experts are called ``gate_up_proj`` and
            ``down_proj``.
        ep_implementation: name in transformers' ``EPImplementationInterface`` of the class that brings tokens to
            experts. One other than ours tells no balance, and nothing runs while its tokens are on their way.

    Returns:
        ``model`` itself; unchanged with ``expert_model_parallel_size=1``.

    Raises:
        TypeError: for a model that is wrapped already, and a malformed plan.
        ValueError: for a model that transformers or FSDP has divided, or in which no experts are found, for names and
            styles that do not fit, for a number of experts that does not divide, for experts that
            ``tensor_parallelize`` has divided, and for an implementation that is not registered. Nothing is changed
            then.
        RuntimeError: before ``initialize_model_parallel``, and for parameters that an optimizer holds: it would keep
            stepping the whole ones.

    After Lepikhin et al., "GShard" (arXiv 2006.16668), and transformers' ``AllToAllEP``, whose plans it reads.
    """
    if not isinstance(model, nn.Module) or hasattr(model, "replace_local_tensors"):
        raise TypeError(
            f"expert_parallelize takes a model before it is wrapped, not a {type(model).__name__}: "
            f"NxDPPModel(expert_parallelize(model), ...)"
        )
    refuse_other_wrappers(model)
    check_implementation(ep_implementation)
    ranks = parallel_state.get_expert_model_parallel_size()
    if any(map(is_of_experts, model.parameters())):
        raise ValueError("the experts of the model are divided already: call expert_parallelize once")
    base = base_of(model)
    found = _experts(base, plan)
    if ranks == 1:
        return model
    for name, (module, keys) in found.items():
        _check(name, module, keys, ranks)
    before = dict(model.named_parameters())
    check_no_optimizer_holds(before, "Make the optimizer after NxDPPModel(expert_parallelize(model), ...).")
    refuse_partial_steps()
    parts: dict[nn.Parameter, nn.Parameter] = {}
    for name, (module, keys) in found.items():
        _divide(module, keys, ranks, parts)
        choose_implementation(module, ep_implementation)
        find_shared(base.get_submodule(name.rpartition(".")[0]))
    kept = {id(parameter) for parameter in model.parameters()}
    watch_replaced({name: parameter for name, parameter in before.items() if id(parameter) not in kept})
    refuse_methods(model, divides_logits=False)
    return model


def known_experts(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return the parameters that ``expert_parallelize`` divides, by the names of their modules; empty without any."""
    return {name: [PARAMETERS.of(module)[key] for key in keys] for name, (module, keys) in _known(model).items()}


def _known(model: nn.Module) -> dict[str, tuple[nn.Module, list[str]]]:
    """Return the modules of experts, as ``_experts``, by the plan of the model or by shapes."""
    plan = dict(getattr(model, "ep_plan", None) or {})
    return _planned(model, plan)[0] if _EXPERTS in plan.values() else _shaped(model)


def _experts(model: nn.Module, plan: Mapping[str, str] | None) -> dict[str, tuple[nn.Module, list[str]]]:
    """Return the modules of experts by name, each with the names of its parameters that are divided."""
    if plan is None:
        found = _known(model)
        if not found:
            raise ValueError(
                f"{type(model).__name__} has no plan for experts, and no module with parameters gate_up_proj and "
                f"down_proj of shape (experts, ...): {_remedy(model)}"
            )
        return found
    if not isinstance(plan, Mapping) or not all(isinstance(each, str) for pair in plan.items() for each in pair):
        raise TypeError(f'plan must be a dict of name patterns and "{_EXPERTS}", not {plan!r:.80}')
    if unknown := sorted({style for style in plan.values() if style not in (_EXPERTS, _MODULE)}):
        raise ValueError(f"unknown styles in the plan: {', '.join(unknown)}. The styles are {_EXPERTS}, {_MODULE}")
    found, unmatched = _planned(model, plan)
    if unmatched or not found:
        missing = ", ".join(unmatched) or f'no parameter with "{_EXPERTS}"'
        raise ValueError(f"the plan names {missing}, which {type(model).__name__} does not have: correct it")
    return found


def _remedy(model: nn.Module) -> str:
    """What to do for a ``model`` in which no experts are found."""
    listed = (
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and "expert" in name.rpartition(".")[2]
    )
    if (name := next(listed, None)) is not None:
        return (
            f"the experts in {name} are modules, which their block calls one by one, each if tokens of this rank chose "
            f"it. Write them as one module with a parameter (experts, ...) for each weight, and a forward of tokens "
            f"(N, H), the chosen experts (N, K) and their weights (N, K)"
        )
    return f'give plan=, a dict of name patterns, such as {{"layers.*.moe.experts.weight": "{_EXPERTS}"}}'


def _planned(model: nn.Module, plan: Mapping[str, str]) -> tuple[dict[str, tuple[nn.Module, list[str]]], list[str]]:
    of_modules, of_parameters, unmatched = expanded(plan, model)
    named = [f"{name}." for name, style in of_modules.items() if style == _MODULE]
    found: dict[str, tuple[nn.Module, list[str]]] = {}
    # A module may have several names.
    first: dict[nn.Module, str] = {}
    for name, style in of_parameters.items():
        if style == _EXPERTS:
            owner = next((each[:-1] for each in named if name.startswith(each)), name.rpartition(".")[0])
            module, key = model.get_submodule(owner), name.removeprefix(f"{owner}.")
            _, keys = found.setdefault(first.setdefault(module, owner), (module, []))
            if key not in keys:
                keys.append(key)
    return found, unmatched


def _shaped(model: nn.Module) -> dict[str, tuple[nn.Module, list[str]]]:
    """Modules with ``down_proj`` and the like of three dimensions, and all parameters with as many experts."""
    found = {}
    for name, module in model.named_modules():
        own = PARAMETERS.of(module)
        shaped = {key: own[key] for key in _SHAPED if own.get(key) is not None and own[key].dim() == 3}
        counts = {key: len(each) for key, each in shaped.items()}
        if len(shaped) > 1:
            _check_equal(name, counts)
            count = next(iter(counts.values()))
            found[name] = (module, [key for key, each in own.items() if each is not None and len(each) == count])
    return found


def _check_equal(name: str, counts: Mapping[str, int]) -> None:
    """Raise ``ValueError`` for parameters of the module ``name`` with different ``counts`` of experts."""
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"the parameters of {name} have different numbers of experts along dimension 0: {dict(counts)}. Name in "
            f"plan= only those with one row for each expert; experts without weights are not divided"
        )


def _check(name: str, module: nn.Module, keys: list[str], ranks: int) -> None:
    """Raise ``ValueError`` for experts that ``ranks`` cannot share."""
    given = list(inspect.signature(type(module).forward).parameters)[1:]
    if len(given) != 3:
        raise ValueError(
            f"{name}, a {type(module).__name__}, takes {', '.join(given) or 'nothing'}: experts over ranks take hidden "
            f"states (N, H), the chosen experts (N, K) and their weights (N, K). Name another module in plan=; "
            f"experts that are modules in a list have to become one parameter (experts, ...) first"
        )
    _check_equal(name, {key: len(module.get_parameter(key)) for key in keys})
    if (count := _count(module, keys)) % ranks:
        raise ValueError(
            f"the {count} experts of {name} do not divide by expert_model_parallel_size={ranks}: give a divisor of "
            f"{count}"
        )
    if any(is_tensor_parallel(module.get_parameter(key)) for key in keys):
        raise ValueError(
            f"{name} has tensor-parallel parameters already, and experts over ranks are whole experts: call "
            f"tensor_parallelize(expert_parallelize(model))"
        )


def _divide(module: nn.Module, keys: list[str], ranks: int, parts: dict[nn.Parameter, nn.Parameter]) -> None:
    """Keep this rank's experts in ``module``; ``parts`` has the part of each parameter, which modules may share."""
    count = _count(module, keys)
    for key in keys:
        owner, _, own_key = key.rpartition(".")
        own = PARAMETERS.of(module.get_submodule(owner))
        if own[own_key] not in parts:
            parts[own[own_key]] = _part(own[own_key], ranks)
        own[own_key] = parts[own[own_key]]
    for each in module.modules():
        for attribute in _COUNTS:
            if vars(each).get(attribute) == count:
                setattr(each, attribute, count // ranks)
    vars(module)["own_experts"] = count // ranks
    override(module, DividedExperts)


def _count(module: nn.Module, keys: list[str]) -> int:
    """Number of experts of ``module``: what it says itself, if that divides the rows of its parameters."""
    rows = len(module.get_parameter(keys[0]))
    told = [vars(module).get(attribute) for attribute in _COUNTS]
    return next((each for each in told if isinstance(each, int) and each > 0 and rows % each == 0), rows)


def _part(parameter: nn.Parameter, ranks: int) -> nn.Parameter:
    """This rank's experts of ``parameter``, in memory of their own."""
    # The record of deferred_init knows the meta tensor itself.
    whole = parameter if parameter.is_meta else torch.empty_like(parameter, device="meta", requires_grad=False)
    description = PartOf(whole, 0, parallel_state.get_expert_model_parallel_rank(), ranks)
    with torch.no_grad():
        part: Any = with_type_of(description.take(parameter), parameter)
    mark_experts(part)
    mark_part(part, description)
    result: nn.Parameter = part
    return result
