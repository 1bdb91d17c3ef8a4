"""The transformer layers of a model: given, declared, or the longest run of equal modules in its lists of modules."""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import accumulate, groupby
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from nxdpp.ground.transformers_names import UNSPLIT
from nxdpp.tracing.models.transformers_models import language_model, transformers_models
from nxdpp.tracing.modules import listings
from nxdpp.tracing.modules.closest_name import meant

_logger = logging.getLogger(__name__)

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_SHORTEST = 2
# Similarity of 1.0: that of "LamaLayer" and "LlamaLayer" is 0.95, of "LlamaBlock" and "LlamaDecoderLayer" 0.44.
_MISTYPED = 0.8
_SAME_PREFIX = 0.3


def find_layer_classes(module: nn.Module, transformer_layer_cls: Any | None) -> tuple[type[nn.Module], ...]:
    """The classes of ``module``'s transformer layers.

    ``transformer_layer_cls`` is a class or a class name, or a list of them. Without it, ``module`` and the Hugging Face
    models in it give their ``_no_split_modules``, otherwise their ``GradientCheckpointingLayer`` classes. Both count
    only if their instances are in a list of modules. An embedding that must not be split is not a layer. Where nothing
    is declared, the longest run of equal modules in a list is taken, or all runs of this length, and a warning names
    them.

    Raises ``ValueError`` if there is no layer, and for layers that the model runs several times by its configuration.
    """
    if transformer_layer_cls is None:
        if declared := _declared_layer_classes(module):
            return declared
        _refuse_shared_groups(module, (nn.Module,))
        return _longest_runs(module, _names(_listed_classes(module)))
    wanted = transformer_layer_cls if isinstance(transformer_layer_cls, list | tuple) else [transformer_layer_cls]
    classes = resolve_classes(module, wanted, "transformer_layer_cls")
    if not any(is_instance(child, classes) for child in listings.modules(module)):
        raise ValueError(
            f"transformer_layer_cls={_names(classes)}: {type(module).__name__} has no module of that class. "
            f"Lists of modules in it hold: {_names(_listed_classes(module)) or 'nothing'}."
        )
    _refuse_shared_groups(module, classes)
    return classes


def resolve_classes(module: nn.Module, wanted: Iterable[Any], argument: str) -> tuple[type[nn.Module], ...]:
    """Classes from classes and class names. A name means every class of that name in ``module``.

    Raises ``ValueError`` for a name without a class in ``module``, ``TypeError`` for anything else.
    """
    classes: dict[type[nn.Module], None] = {}
    for item in wanted:
        if isinstance(item, type) and issubclass(item, nn.Module):
            classes[item] = None
        elif isinstance(item, str):
            found = {type(child) for child in listings.modules(module) if type(child).__name__ == item}
            if not found:
                existing = sorted({type(child).__name__ for child in listings.modules(module)})
                is_layer = argument == "transformer_layer_cls"
                likely = [cls.__name__ for cls in _listed_classes(module)] if is_layer else []
                hint = meant(item, existing, _MISTYPED) or meant(item, likely, _SAME_PREFIX) or meant(item, existing)
                raise ValueError(
                    f"{argument}: no module of {type(module).__name__} is of a class named {item!r}{hint}. "
                    f"It has: {', '.join(existing)}."
                )
            classes.update(dict.fromkeys(sorted(found, key=lambda cls: cls.__module__)))
        else:
            raise TypeError(f"{argument} takes module classes and class names, not {item!r}.")
    return tuple(classes)


def known_leaves(module: nn.Module, wanted: Iterable[Any]) -> list[Any]:
    """Return ``wanted`` without classes that ``module`` lacks, with a warning: scripts name leaves of many models."""
    leaves = list(wanted)
    existing = {type(child).__name__ for child in listings.modules(module)}
    unknown = [leaf for leaf in leaves if isinstance(leaf, str) and leaf not in existing]
    if unknown:
        _logger.warning(
            "leaf_module_cls names %s, and no module of %s is of such a class: nothing is kept whole for it. The "
            "classes are %s",
            ", ".join(f"{name!r}{meant(name, existing)}" for name in unknown),
            type(module).__name__,
            ", ".join(sorted(existing)),
        )
    return [leaf for leaf in leaves if leaf not in unknown]


def layer_names(
    module: nn.Module, layer_classes: tuple[type[nn.Module], ...], others: Collection[str] = ()
) -> list[str]:
    """Qualified names of the outermost layers, in the order of ``named_modules``; a wrapped layer has its wrapper's.

    Modules named in ``others`` count as layers.
    """
    names: list[str] = []
    inside: str | None = None
    for name, child in listings.named_modules(module):
        # Modules inside a layer directly follow it.
        if (inside is None or not name.startswith(inside)) and (name in others or is_instance(child, layer_classes)):
            names.append(name)
            inside = f"{name}."
    return names


def is_instance(module: nn.Module, classes: tuple[type[nn.Module], ...]) -> bool:
    """Return whether ``module``, or the module inside its wrapper, is of one of ``classes``."""
    return isinstance(module, classes) or isinstance(listings.unwrapped(module), classes)


def _refuse_shared_groups(module: nn.Module, classes: tuple[type[nn.Module], ...]) -> None:
    """Raise ``ValueError`` for layers of ``classes`` in a model that runs each of them several times (ALBERT)."""
    for model in transformers_models(module).values():
        layers = getattr(model.config, "num_hidden_layers", None)
        groups = getattr(model.config, "num_hidden_groups", layers)
        if groups != layers and any(is_instance(child, classes) for child in listings.modules(model)):
            raise ValueError(
                f"{type(model).__name__} runs {layers} layers with the weights of {groups} "
                f"(num_hidden_groups={groups}), and a pipeline needs a module for each layer. Make the model with "
                f"num_hidden_groups={layers}, and let the groups that were one share their weights: for each such "
                f"group and the first one of them, for b, a in zip(group.modules(), first.modules()): "
                f"b._parameters.update(a._parameters)."
            )


def are_declared(classes: Iterable[type[nn.Module]], models: Iterable[nn.Module]) -> bool:
    """Return whether each of ``classes`` is a layer by its kind, or by the declaration of one of ``models``."""
    declared = {name for model in models for name in getattr(model, UNSPLIT.name, None) or ()}
    return all(issubclass(cls, GradientCheckpointingLayer) or cls.__name__ in declared for cls in classes)


def declared_around(module: nn.Module, layers: Iterable[str]) -> list[str]:
    """Names of the layer classes that ``module`` declares, and that hold a module named in ``layers`` inside."""
    declared = {cls.__name__: cls for cls in _declared_layer_classes(module)}
    above = {name.rpartition(".")[0] for name in layers if name}
    above |= {outer for name in above for outer in accumulate(name.split("."), "{}.{}".format)}
    kinds = {type(listings.unwrapped(listings.submodule(module, name))) for name in above}
    return [name for name, cls in declared.items() if cls in kinds]


def _declared_layer_classes(module: nn.Module) -> tuple[type[nn.Module], ...]:
    models = dict.fromkeys([module, *transformers_models(module).values()])
    return tuple(dict.fromkeys(cls for model in models for cls in _declared_by(model)))


def _declared_by(module: nn.Module) -> list[type[nn.Module]]:
    listed = _listed_classes(language_model(module) or module)
    declared = set(getattr(module, UNSPLIT.name, None) or ())
    classes = [cls for cls in listed if cls.__name__ in declared]
    if not classes and isinstance(module, PreTrainedModel):
        classes = [cls for cls in listed if issubclass(cls, GradientCheckpointingLayer)]
    return classes


def _listed_classes(module: nn.Module) -> list[type[nn.Module]]:
    lists = (child for child in listings.modules(module) if isinstance(child, nn.ModuleList | nn.Sequential))
    members = dict.fromkeys(type(listings.unwrapped(member)) for modules in lists for member in modules)
    return [cls for cls in members if not issubclass(cls, nn.ModuleList)]


def _names(classes: Iterable[type[nn.Module]]) -> str:
    counts = Counter(cls.__name__ for cls in classes)
    return ", ".join(name if count == 1 else f"{name} ({count} classes)" for name, count in counts.items())


def _longest_runs(module: nn.Module, listed: str) -> tuple[type[nn.Module], ...]:
    """Return the class of the longest run of equal modules in the lists of ``module``, and warn of it on rank 0.

    Runs of one class count together: the blocks of an encoder that has four lists of them. Lists inside a member of a
    run do not count, such as the experts of a layer. Neither do modules of torch without children. Several classes of
    equally long runs are all returned: the encoder and the decoder of one depth. The trace tells their order.

    Raises ``ValueError`` with the ``listed`` classes for a module without a run.
    """
    runs: dict[type[nn.Module], list[tuple[str, int]]] = {}
    roots: Mapping[str, nn.Module] = transformers_models(module) or {"": module}
    for prefix, root in roots.items():
        for name, cls, length in _runs(root, prefix):
            runs.setdefault(cls, []).append((name, length))
    counts = {cls: sum(length for _, length in found) for cls, found in runs.items()}
    longest = [cls for cls, count in counts.items() if count == max(counts.values())]
    name = type(module).__name__
    if not longest:
        raise ValueError(
            f"{name} does not declare its transformer layers, and has no list of equal modules that could be layers. "
            f"Pass transformer_layer_cls; lists of modules in it hold: {listed or 'nothing'}."
        )
    if dist.is_initialized() and dist.get_rank() != 0:
        return tuple(longest)
    told = " and ".join(f"{counts[cls]} {cls.__name__} in {_places(runs[cls])}" for cls in longest)
    _logger.warning(
        "%s declares no transformer layers: its longest %s of equal modules %s taken, %s; pass "
        "transformer_layer_cls for other layers",
        name, *(("run", "is") if len(longest) == 1 else ("runs", "are")), told,
    )  # fmt: skip
    return tuple(longest)


def _runs(module: nn.Module, name: str) -> Iterator[tuple[str, type[nn.Module], int]]:
    """The list, the class and the length of each run, outermost lists first."""
    members = [*module.named_children()]
    taken: set[str] = set()
    if isinstance(module, _LISTS):
        for cls, group in groupby(members, key=lambda member: type(listings.unwrapped(member[1]))):
            run = [key for key, _ in group]
            if len(run) >= _SHORTEST and _may_be_layer(listings.unwrapped(module.get_submodule(run[0]))):
                taken |= set(run)
                yield name, cls, len(run)
    for key, child in members:
        if key not in taken:
            yield from _runs(child, f"{name}.{key}" if name else key)


def _may_be_layer(member: nn.Module) -> bool:
    # A list of linear modules holds heads, or a projection for each of several inputs.
    has_children = any(True for _ in member.children())
    return has_children and any(True for _ in listings.parameters(member)) and not isinstance(member, _LISTS)


def _places(found: list[tuple[str, int]]) -> str:
    return ", ".join(name or "the model" for name, _ in found)
