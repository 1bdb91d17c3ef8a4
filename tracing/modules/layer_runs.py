"""The layers of a model that declares none: the longest runs of equal modules in its lists of modules."""

import logging
from collections.abc import Iterator, Mapping
from itertools import groupby

from torch import nn

from nxdpp.tracing.models.transformers_models import transformers_models
from nxdpp.tracing.modules.listings import parameters, unwrapped

_logger = logging.getLogger(__name__)

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_SHORTEST = 2


def longest_runs(module: nn.Module, listed: str) -> tuple[type[nn.Module], ...]:
    """Return the class of the longest run of equal modules in the lists of ``module``, and log it as a warning.

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
        for cls, group in groupby(members, key=lambda member: type(unwrapped(member[1]))):
            run = [key for key, _ in group]
            if len(run) >= _SHORTEST and _may_be_layer(unwrapped(module.get_submodule(run[0]))):
                taken |= set(run)
                yield name, cls, len(run)
    for key, child in members:
        if key not in taken:
            yield from _runs(child, f"{name}.{key}" if name else key)


def _may_be_layer(member: nn.Module) -> bool:
    # A list of linear modules holds heads, or a projection for each of several inputs.
    has_children = any(True for _ in member.children())
    return has_children and any(True for _ in parameters(member)) and not isinstance(member, _LISTS)


def _places(found: list[tuple[str, int]]) -> str:
    return ", ".join(name or "the model" for name, _ in found)
