"""The transformers models in a module: the module itself, or the ones in it (adapters, heads, two towers)."""

from collections.abc import Collection

from torch import nn
from transformers import PreTrainedModel


def transformers_models(module: nn.Module, among: Collection[str] | None = None) -> dict[str, PreTrainedModel]:
    """The outermost transformers models of ``module`` by name; the root's name is ``""``.

    ``among`` limits the names that are looked at.
    """
    found: dict[str, PreTrainedModel] = {}
    _collect(module, "", among, found, set())
    return found


def _collect(
    module: nn.Module,
    name: str,
    among: Collection[str] | None,
    found: dict[str, PreTrainedModel],
    seen: set[nn.Module],
) -> None:
    if module in seen or (among is not None and name not in among):
        return
    seen.add(module)
    if isinstance(module, PreTrainedModel):
        found[name] = module
        return
    for key, child in module.named_children():
        _collect(child, f"{name}.{key}" if name else key, among, found, seen)
