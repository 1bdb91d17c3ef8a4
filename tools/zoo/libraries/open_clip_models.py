"""open_clip: contrastive models of images and texts, and CoCa."""

from functools import partial
from typing import Any

import torch
from open_clip.coca_model import CoCa
from open_clip.model import CLIP, CustomTextCLIP
from torch import Tensor, nn
from torch.nn import functional as F

from tools.zoo.libraries.case import Batch, Case


class Contrastive(nn.Module):
    """Cross-entropy between images and texts of a batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        features = self.model(image, text)
        logits = features[2] * features[0] @ features[1].T
        targets = torch.arange(logits.size(0), device=logits.device)
        return F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)


class Captioned(nn.Module):
    """Cross-entropy of CoCa's captions."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        out = self.model(image, text)
        return F.cross_entropy(out["logits"].flatten(0, 1), out["labels"].flatten())


_VISION = {"image_size": 32, "layers": 4, "width": 32, "head_width": 16, "patch_size": 8}
_TEXT = {"context_length": 16, "vocab_size": 64, "width": 32, "heads": 2, "layers": 4}
_LAYERS = "ResidualAttentionBlock"


def _clip(model: type[nn.Module], vision: dict[str, Any], text: dict[str, Any], **settings: Any) -> nn.Module:
    return Contrastive(model(32, _VISION | vision, _TEXT | text, **settings))


def _coca() -> nn.Module:
    decoder = {"context_length": 16, "vocab_size": 64, "width": 32, "heads": 2, "layers": 2}
    text = _TEXT | {"embed_cls": True, "output_tokens": True, "layers": 2}
    vision = _VISION | {"attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True, "layers": 2}
    model = CoCa(32, decoder, text, vision)
    # CoCa leaves it as memory without values, such as NaN: a checkpoint gives its values.
    nn.init.normal_(model.text_decoder.text_projection, std=0.1)
    return Captioned(model)


def _batch(generator: torch.Generator, rows: int) -> Batch:
    text = torch.randint(1, 63, (rows, 16), generator=generator)
    text[:, -1] = 63
    return {"image": torch.randn(rows, 3, 32, 32, generator=generator), "text": text}


def _case(vision: dict[str, Any] | None = None, text: dict[str, Any] | None = None, custom: bool = False) -> Case:
    model = CustomTextCLIP if custom else CLIP
    return Case(partial(_clip, model, vision or {}, text or {}), _batch, _LAYERS)


CASES = {
    "CLIP": _case(),
    "CLIP, layer scale": _case({"ls_init_value": 0.1}),
    "CLIP, average pooling": _case({"pool_type": "avg"}),
    "CLIP, attention pooling": _case({"attentional_pool": True, "attn_pooler_heads": 2}),
    "CLIP, sine positions": _case({"pos_embed_type": "sin_cos_2d"}),
    "CLIP, custom text": _case(custom=True),
    "CLIP, last token": _case(text={"pool_type": "last"}, custom=True),
    "SigLIP": _case({"pool_type": "tok"}, {"no_causal_mask": True, "pool_type": "last"}, custom=True),
    "CoCa": Case(_coca, _batch, _LAYERS),
}
