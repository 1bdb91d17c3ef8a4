"""diffusers: denoisers, trained on the mean square to a target."""

from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tools.zoo.libraries.case import Batch, Case

_TEXT = 8  # tokens
_DIM = 32


class Denoised(nn.Module):
    """A denoiser without a text, or with class labels."""

    def __init__(self, model: nn.Module, with_classes: bool = False) -> None:
        super().__init__()
        self.model = model
        self.with_classes = with_classes

    def forward(self, noisy: Tensor, timestep: Tensor, target: Tensor) -> Tensor:
        classes = {"class_labels": timestep % 4} if self.with_classes else {}
        sample = self.model(noisy, timestep=timestep, **classes).sample
        return F.mse_loss(sample[:, : target.size(1)], target)


class DenoisedWithText(nn.Module):
    """A denoiser with a text; ``settings`` are the same in each step."""

    def __init__(self, model: nn.Module, settings: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.settings = settings

    def forward(self, noisy: Tensor, timestep: Tensor, text: Tensor, target: Tensor) -> Tensor:
        sample = self.model(noisy, timestep=timestep, encoder_hidden_states=text, **self.settings).sample
        return F.mse_loss(sample[:, : target.size(1)], target)


class DenoisedWithPooledText(nn.Module):
    """Stable Diffusion 3 and others, with a pooled text too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, noisy: Tensor, timestep: Tensor, text: Tensor, pooled: Tensor, target: Tensor) -> Tensor:
        sample = self.model(noisy, timestep=timestep, encoder_hidden_states=text, pooled_projections=pooled).sample
        return F.mse_loss(sample, target)


class DenoisedWithMask(nn.Module):
    """Models that need the mask of the text; ``name`` is its argument."""

    def __init__(self, model: nn.Module, name: str, settings: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.name, self.settings = model, name, settings

    def forward(self, noisy: Tensor, timestep: Tensor, text: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        given = {self.name: mask, **self.settings}
        sample = self.model(noisy, timestep=timestep, encoder_hidden_states=text, **given).sample
        return F.mse_loss(sample[:, : target.size(1)], target)


class DenoisedWithMaskAndPooledText(nn.Module):
    """Models that need a pooled text and the mask of the text."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, noisy: Tensor, timestep: Tensor, text: Tensor, pooled: Tensor, mask: Tensor, target: Tensor
    ) -> Tensor:
        given = {"encoder_hidden_states": text, "encoder_attention_mask": mask, "pooled_projections": pooled}
        return F.mse_loss(self.model(noisy, timestep=timestep, **given).sample, target)


class DenoisedPatches(nn.Module):
    """Flux and its relatives: patches with positions, which have no rows."""

    def __init__(self, model: Any, pooled: bool, guidance: bool) -> None:
        super().__init__()
        self.model, self.with_pooled, self.with_guidance = model, pooled, guidance
        axes = len(model.config.axes_dims_rope)
        self.register_buffer("img_ids", torch.arange(16 * axes).view(16, axes).float() % 4)
        self.register_buffer("txt_ids", torch.zeros(_TEXT, axes))

    def forward(self, noisy: Tensor, timestep: Tensor, text: Tensor, pooled: Tensor, target: Tensor) -> Tensor:
        given = {"pooled_projections": pooled} if self.with_pooled else {}
        if self.with_guidance:
            given["guidance"] = torch.ones_like(timestep) * 3.5
        ids = {"img_ids": self.img_ids, "txt_ids": self.txt_ids}
        sample = self.model(noisy, timestep=timestep, encoder_hidden_states=text, **ids, **given).sample
        return F.mse_loss(sample, target)


def _batch(
    shape: tuple[int, ...],
    text: int | None = None,
    pooled: int | None = None,
    mask: bool = False,
    continuous: bool = False,
    target: tuple[int, ...] | None = None,
) -> Callable[[torch.Generator, int], Batch]:
    def batch(generator: torch.Generator, rows: int) -> Batch:
        time = (
            torch.rand(rows, generator=generator) if continuous else torch.randint(1000, (rows,), generator=generator)
        )
        given = {"noisy": torch.randn(rows, *shape, generator=generator), "timestep": time}
        if text is not None:
            given["text"] = torch.randn(rows, _TEXT, text, generator=generator)
        if pooled is not None:
            given["pooled"] = torch.randn(rows, pooled, generator=generator)
        if mask:
            given["mask"] = torch.ones(rows, _TEXT, dtype=torch.long)
        return given | {"target": torch.randn(rows, *(target or shape), generator=generator)}

    return batch


def _plain(name: str, with_classes: bool, settings: dict[str, Any]) -> nn.Module:
    return Denoised(getattr(diffusers, name)(**settings), with_classes)


def _text(name: str, fixed: dict[str, Any], settings: dict[str, Any]) -> nn.Module:
    return DenoisedWithText(getattr(diffusers, name)(**settings), fixed)


def _pooled(name: str, settings: dict[str, Any]) -> nn.Module:
    return DenoisedWithPooledText(getattr(diffusers, name)(**settings))


def _masked(name: str, argument: str, fixed: dict[str, Any], settings: dict[str, Any]) -> nn.Module:
    return DenoisedWithMask(getattr(diffusers, name)(**settings), argument, fixed)


def _masked_and_pooled(name: str, settings: dict[str, Any]) -> nn.Module:
    return DenoisedWithMaskAndPooledText(getattr(diffusers, name)(**settings))


def _patches(name: str, pooled: bool, guidance: bool, settings: dict[str, Any]) -> nn.Module:
    return DenoisedPatches(getattr(diffusers, name)(**settings), pooled, guidance)


_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
_FLUX = {**_HEADS, "in_channels": 16, "num_layers": 2, "num_single_layers": 2, "joint_attention_dim": _DIM}
_UNET = {"sample_size": 16, "block_out_channels": (16, 16), "layers_per_block": 1, "norm_num_groups": 4}
_BLOCKS_2D = ["DownBlock2D", "AttnDownBlock2D", "UNetMidBlock2D", "AttnUpBlock2D", "UpBlock2D"]
_CROSS_2D = ["CrossAttnDownBlock2D", "DownBlock2D", "UNetMidBlock2DCrossAttn", "UpBlock2D", "CrossAttnUpBlock2D"]
_TRANSFORMER = "BasicTransformerBlock"

CASES = {
    "DiT": Case(
        partial(
            _plain,
            "DiTTransformer2DModel",
            True,
            {
                **_HEADS,
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": 4,
                "sample_size": 8,
                "patch_size": 2,
                "num_embeds_ada_norm": 1000,
            },
        ),
        _batch((4, 8, 8)),
        _TRANSFORMER,
    ),
    "PixArt": Case(
        partial(
            _text,
            "PixArtTransformer2DModel",
            {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
            {
                **_HEADS,
                "in_channels": 4,
                "out_channels": 8,
                "num_layers": 4,
                "sample_size": 8,
                "patch_size": 2,
                "cross_attention_dim": 32,
                "caption_channels": _DIM,
                "use_additional_conditions": False,
            },
        ),
        _batch((4, 8, 8), _DIM),
        _TRANSFORMER,
    ),
    "Stable Diffusion 3": Case(
        partial(
            _pooled,
            "SD3Transformer2DModel",
            {
                **_HEADS,
                "sample_size": 8,
                "patch_size": 2,
                "in_channels": 4,
                "num_layers": 4,
                "joint_attention_dim": _DIM,
                "caption_projection_dim": 32,
                "pooled_projection_dim": 24,
                "out_channels": 4,
                "pos_embed_max_size": 16,
            },
        ),
        _batch((4, 8, 8), _DIM, 24),
        "JointTransformerBlock",
    ),
    "Flux": Case(
        partial(
            _patches,
            "FluxTransformer2DModel",
            True,
            False,
            {**_FLUX, "pooled_projection_dim": 24, "axes_dims_rope": (4, 4, 8)},
        ),
        _batch((16, 16), _DIM, 24, continuous=True),
        ["FluxTransformerBlock", "FluxSingleTransformerBlock"],
    ),
    "Flux with guidance": Case(
        partial(
            _patches,
            "FluxTransformer2DModel",
            True,
            True,
            {**_FLUX, "pooled_projection_dim": 24, "axes_dims_rope": (4, 4, 8), "guidance_embeds": True},
        ),
        _batch((16, 16), _DIM, 24, continuous=True),
        ["FluxTransformerBlock", "FluxSingleTransformerBlock"],
    ),
    "Chroma": Case(
        partial(
            _patches,
            "ChromaTransformer2DModel",
            False,
            False,
            {
                **_FLUX,
                "axes_dims_rope": (4, 4, 8),
                "approximator_num_channels": 16,
                "approximator_hidden_dim": 32,
                "approximator_layers": 1,
            },
        ),
        _batch((16, 16), _DIM, 24, continuous=True),
        ["ChromaTransformerBlock", "ChromaSingleTransformerBlock"],
    ),
    "Bria": Case(
        partial(_patches, "BriaTransformer2DModel", False, False, {**_FLUX, "axes_dims_rope": [4, 4, 8]}),
        _batch((16, 16), _DIM, 24, continuous=True),
        ["BriaTransformerBlock", "BriaSingleTransformerBlock"],
    ),
    "Flux 2": Case(
        partial(
            _patches,
            "Flux2Transformer2DModel",
            False,
            True,
            {**_FLUX, "timestep_guidance_channels": 16, "axes_dims_rope": (4, 4, 4, 4)},
        ),
        _batch((16, 16), _DIM, 24, continuous=True),
        ["Flux2TransformerBlock", "Flux2SingleTransformerBlock"],
    ),
    "AuraFlow": Case(
        partial(
            _text,
            "AuraFlowTransformer2DModel",
            {},
            {
                **_HEADS,
                "sample_size": 8,
                "num_mmdit_layers": 2,
                "num_single_dit_layers": 2,
                "joint_attention_dim": _DIM,
                "caption_projection_dim": 32,
                "pos_embed_max_size": 64,
            },
        ),
        _batch((4, 8, 8), _DIM, continuous=True),
        ["AuraFlowJointTransformerBlock", "AuraFlowSingleTransformerBlock"],
    ),
    "LTX Video": Case(
        partial(
            _masked,
            "LTXVideoTransformer3DModel",
            "encoder_attention_mask",
            {"num_frames": 2, "height": 2, "width": 2},
            {
                **_HEADS,
                "in_channels": 8,
                "out_channels": 8,
                "cross_attention_dim": 32,
                "num_layers": 4,
                "caption_channels": _DIM,
            },
        ),
        _batch((8, 8), _DIM, mask=True),
        "LTXVideoTransformerBlock",
    ),
    "CogVideoX": Case(
        partial(
            _text,
            "CogVideoXTransformer3DModel",
            {},
            {
                **_HEADS,
                "in_channels": 4,
                "out_channels": 4,
                "time_embed_dim": 16,
                "text_embed_dim": _DIM,
                "num_layers": 4,
                "sample_width": 8,
                "sample_height": 8,
                "sample_frames": 5,
                "max_text_seq_length": _TEXT,
            },
        ),
        _batch((2, 4, 8, 8), _DIM),
        "CogVideoXBlock",
    ),
    "Wan": Case(
        partial(
            _text,
            "WanTransformer3DModel",
            {},
            {
                **_HEADS,
                "in_channels": 4,
                "out_channels": 4,
                "text_dim": _DIM,
                "freq_dim": 16,
                "ffn_dim": 32,
                "num_layers": 4,
                "rope_max_seq_len": 32,
            },
        ),
        _batch((4, 2, 8, 8), _DIM),
        "WanTransformerBlock",
    ),
    "Mochi": Case(
        partial(
            _masked,
            "MochiTransformer3DModel",
            "encoder_attention_mask",
            {},
            {
                **_HEADS,
                "num_layers": 4,
                "pooled_projection_dim": 16,
                "in_channels": 4,
                "text_embed_dim": _DIM,
                "time_embed_dim": 8,
                "max_sequence_length": 16,
            },
        ),
        _batch((4, 2, 8, 8), _DIM, mask=True),
        "MochiTransformerBlock",
    ),
    "Sana": Case(
        partial(
            _text,
            "SanaTransformer2DModel",
            {},
            {
                **_HEADS,
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": 4,
                "num_cross_attention_heads": 2,
                "cross_attention_head_dim": 16,
                "cross_attention_dim": 32,
                "caption_channels": _DIM,
                "sample_size": 8,
            },
        ),
        _batch((4, 8, 8), _DIM),
        "SanaTransformerBlock",
    ),
    "Lumina 2": Case(
        partial(
            _masked,
            "Lumina2Transformer2DModel",
            "encoder_attention_mask",
            {},
            {
                "sample_size": 8,
                "in_channels": 4,
                "hidden_size": 24,
                "num_layers": 4,
                "num_refiner_layers": 1,
                "num_attention_heads": 1,
                "num_kv_heads": 1,
                "axes_dim_rope": (8, 8, 8),
                "axes_lens": (32, 32, 32),
                "cap_feat_dim": _DIM,
                "multiple_of": 8,
            },
        ),
        _batch((4, 8, 8), _DIM, mask=True, continuous=True),
        "Lumina2TransformerBlock",
    ),
    "Qwen-Image": Case(
        partial(
            _masked,
            "QwenImageTransformer2DModel",
            "encoder_hidden_states_mask",
            {"img_shapes": [[(1, 4, 4)]]},
            {
                **_HEADS,
                "in_channels": 16,
                "out_channels": 4,
                "num_layers": 4,
                "joint_attention_dim": _DIM,
                "axes_dims_rope": (4, 4, 8),
            },
        ),
        _batch((16, 16), _DIM, mask=True, continuous=True),
        "QwenImageTransformerBlock",
    ),
    "Latte": Case(
        partial(
            _text,
            "LatteTransformer3DModel",
            {},
            {
                **_HEADS,
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": 4,
                "sample_size": 8,
                "patch_size": 2,
                "cross_attention_dim": 32,
                "caption_channels": _DIM,
                "video_length": 2,
                "norm_type": "ada_norm_single",
            },
        ),
        _batch((4, 2, 8, 8), _DIM),
        _TRANSFORMER,
    ),
    "Cosmos": Case(
        partial(
            _text,
            "CosmosTransformer3DModel",
            {"padding_mask": None},
            {
                **_HEADS,
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": 4,
                "text_embed_dim": _DIM,
                "adaln_lora_dim": 8,
                "max_size": (4, 8, 8),
                "concat_padding_mask": False,
            },
        ),
        _batch((4, 2, 8, 8), _DIM),
        "CosmosTransformerBlock",
    ),
    "Hunyuan Video": Case(
        partial(
            _masked_and_pooled,
            "HunyuanVideoTransformer3DModel",
            {
                **_HEADS,
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": 2,
                "num_single_layers": 2,
                "num_refiner_layers": 1,
                "text_embed_dim": _DIM,
                "pooled_projection_dim": 24,
                "rope_axes_dim": (4, 4, 8),
                "guidance_embeds": False,
            },
        ),
        _batch((4, 2, 8, 8), _DIM, 24, mask=True),
        ["HunyuanVideoTransformerBlock", "HunyuanVideoSingleTransformerBlock"],
    ),
    "UNet 2D": Case(
        partial(
            _plain,
            "UNet2DModel",
            False,
            {
                **_UNET,
                "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
                "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
                "attention_head_dim": 8,
            },
        ),
        _batch((3, 16, 16)),
        _BLOCKS_2D,
    ),
    "UNet 2D with classes": Case(
        partial(
            _plain,
            "UNet2DModel",
            True,
            {
                **_UNET,
                "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
                "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
                "attention_head_dim": 8,
                "num_class_embeds": 4,
            },
        ),
        _batch((3, 16, 16)),
        _BLOCKS_2D,
    ),
    "UNet 2D with text": Case(
        partial(
            _text,
            "UNet2DConditionModel",
            {},
            {
                **_UNET,
                "cross_attention_dim": _DIM,
                "attention_head_dim": 2,
                "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
                "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            },
        ),
        _batch((4, 16, 16), _DIM),
        _CROSS_2D,
    ),
}
