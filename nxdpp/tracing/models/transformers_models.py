"""The transformers models in a module (under adapters, heads, in two towers), and the language model in one."""

from collections.abc import Collection

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from nxdpp.tracing.modules import listings


def transformers_models(module: nn.Module, among: Collection[str] | None = None) -> dict[str, PreTrainedModel]:
    """The outermost transformers models of ``module`` by name, ``""`` for the root; only names ``among``."""
    found: dict[str, PreTrainedModel] = {}
    _collect(module, "", among, found, set())
    return found


def _collect(
    module: nn.Module, name: str, among: Collection[str] | None, found: dict[str, PreTrainedModel], seen: set[nn.Module]
) -> None:
    if module in seen or (among is not None and name not in among):
        return
    seen.add(module)
    if isinstance(module, PreTrainedModel):
        found[name] = module
        return
    for key, child in module.named_children():
        _collect(child, f"{name}.{key}" if name else key, among, found, seen)


def language_model(module: nn.Module) -> nn.Module | None:
    """The decoder of text in a model that also encodes images, video or audio; ``None`` for any other model.

    Its layers are cut. A tower before it is a single node of the first stage.
    """
    if not isinstance(module, PreTrainedModel) or module.config.is_encoder_decoder:
        return None
    text = module.config.get_text_config()
    towers = [part for part in vars(module.config).values() if isinstance(part, PreTrainedConfig) and part is not text]
    if text is module.config or not towers:
        return None
    found = (
        child
        for child in listings.modules(module)
        if isinstance(child, PreTrainedModel) and child.config is text and _has_list(child)
    )
    return next(found, None)


def _has_list(module: nn.Module) -> bool:
    return any(isinstance(child, nn.ModuleList) for child in listings.modules(module))


def returns_tuples(model: PreTrainedModel) -> bool:
    """Return whether the configuration of ``model`` asks for tuples in place of outputs with names."""
    return not getattr(model.config, "return_dict", True)
