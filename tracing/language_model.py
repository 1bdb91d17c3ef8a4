"""The language model inside a model for several modalities."""

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from nxdpp.tracing import listings


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
