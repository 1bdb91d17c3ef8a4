"""Quantised weights of a Hugging Face directory: dequantised by transformers' own conversions, or refused.

``config.json`` names the method. Blocks of FP8 and MXFP4 are weights and scales, from which the values follow::

    q_proj.weight (N, K) float8, q_proj.weight_scale_inv (N / 128, K / 128) float32  ─▶  q_proj.weight (N, K) float
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers.auto import AutoHfQuantizer

from nxdpp.checkpoint.files.pieces import printable
from nxdpp.checkpoint.files.safetensors_reader import StoredTensor
from nxdpp.checkpoint.huggingface.read_directory import CONFIG_FILE, method_of, quantisation_of, settings_of

_DEQUANTISED = ("fp8", "mxfp8", "mxfp4")
# Names that only quantised weights have.
_PARTS = ("qweight", "qzeros", "g_idx", "SCB", "absmax", "quant_map", "weight_packed", "weight_scale_inv")
_PART_ENDINGS = ("_proj_blocks", "_proj_scales", "_proj_scale_inv")


class _Blocks(Fp8Dequantize):
    """Conversion from FP8 by the block size of the configuration; the last blocks of a dimension may be smaller.

    Weights without a scale keep their dtype, which ``load_pretrained`` compares with the model's.
    """

    def convert(self, input_dict: Any, *others: Any, **named: Any) -> Any:
        """Return the weights of one module by name, dequantised where they have a scale."""
        if "weight" in input_dict and "weight_scale_inv" not in input_dict:
            (weight,) = given if isinstance(given := input_dict["weight"], list) else [given]
            return {named.get("full_layer_name") or "weight": weight}
        return super().convert(input_dict, *others, **named)

    def _dequantize_one(
        self, quantized: torch.Tensor, scales: torch.Tensor, output_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        block = self.hf_quantizer.quantization_config.weight_block_size
        if block is None or not quantized.is_floating_point() or quantized.ndim < 2:
            return super()._dequantize_one(quantized, scales, output_dtype)
        rows, columns = quantized.shape[-2:]
        grid = -(-rows // block[0]), -(-columns // block[1])
        if grid != tuple(scales.shape[-2:]):
            return super()._dequantize_one(quantized, scales, output_dtype)
        missing = grid[0] * block[0] - rows, grid[1] * block[1] - columns
        whole = pad(quantized.to(torch.float32), (0, missing[1], 0, missing[0]))
        return super()._dequantize_one(whole, scales, output_dtype)[..., :rows, :columns]


def quantiser_of(directory: Path, settings: dict[str, Any], dequantize: bool, model: nn.Module) -> Any | None:
    """The quantiser of transformers whose conversions dequantise the weights; ``None`` for plain weights.

    ``settings`` are the content of the ``config.json`` in ``directory``.

    Raises ``ValueError`` for quantised weights unless ``dequantize``, for a method that cannot be dequantised, and for
    a ``model`` that is not from transformers.
    """
    quantisation = quantisation_of(settings)
    if quantisation is None:
        return None
    method = printable(method_of(settings))
    says = f"{directory / CONFIG_FILE} says that the weights are quantized ({method})"
    if method not in _DEQUANTISED:
        raise ValueError(f"{says}, which cannot be loaded. Nothing was loaded. {_remedy(method)}")
    if not dequantize:
        raise ValueError(
            f"{says}. Nothing was loaded. Give dequantize=True to load them in the dtypes of the model, or give a "
            f"checkpoint that is not quantized."
        )
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"{says}, which are dequantized into a model of transformers alone, not into a {type(model).__name__}. "
            f"Nothing was loaded. Give a checkpoint that is not quantized."
        )
    quantiser: Any = AutoHfQuantizer.from_config({**quantisation, "dequantize": True}, pre_quantized=True)
    if method != "mxfp4":
        quantiser.get_load_operations = lambda: {"dequantize": _Blocks}
    return quantiser


def can_dequantise(directory: Path) -> bool:
    """Return whether ``directory`` has quantised weights that ``load_pretrained`` dequantises."""
    return method_of(settings_of(directory)) in _DEQUANTISED


def check_no_parts(names: Iterable[str], directory: Path) -> None:
    """Raise ``ValueError`` for ``names`` of tensors that only quantised weights have."""
    for name in names:
        if name.rpartition(".")[2] in _PARTS or name.endswith(_PART_ENDINGS):
            raise ValueError(
                f"{printable(name)} in {directory} is a part of a quantized weight, and config.json names no "
                f"quantization_config. Nothing was loaded. Copy or download config.json again, or give a checkpoint "
                f"that is not quantized."
            )


def check_none_replaces(
    missing: Collection[str], unexpected: Mapping[str, str], stored: Mapping[str, StoredTensor], directory: Path
) -> None:
    """Raise ``ValueError`` for small integers of the files that are in the place of a ``missing`` weight.

    Methods of quantisation have names of their own for them. ``unexpected`` has the name in ``stored`` of each tensor.
    """
    owners = {name.removesuffix("weight"): name for name in missing if name.endswith(".weight")}
    for name, source in unexpected.items():
        dtype = stored[source].dtype
        is_small = dtype.itemsize == 1 or (dtype.itemsize < 8 and not dtype.is_floating_point)
        weight = next((weight for owner, weight in owners.items() if name.startswith(owner)), None)
        if weight is not None and is_small and dtype != torch.bool:
            raise ValueError(
                f"{directory} has {printable(source)} of {dtype} and no {weight}, which is quantized then, and "
                f"config.json names no quantization_config. Nothing was loaded. Copy or download config.json again, or "
                f"give a checkpoint that is not quantized."
            )


def forget_quantisation(model: nn.Module) -> None:
    """Remove the quantisation from the configuration of ``model``, whose weights have none; a save writes it."""
    config: Any = getattr(model, "config", None)
    parts: list[Any] = [config, getattr(config, "text_config", None)]
    for part in parts:
        if hasattr(part, "quantization_config"):
            del part.quantization_config


def _remedy(method: str) -> str:
    if method in ("bitsandbytes", "higgs"):
        return (
            "Dequantize it once with transformers: model = CLASS.from_pretrained(DIRECTORY); model.dequantize(); "
            "model.save_pretrained(ANOTHER)."
        )
    if method in ("compressed-tensors", "metal"):
        return (
            "Dequantize it once with transformers: CLASS.from_pretrained(DIRECTORY, quantization_config=CONFIG)"
            ".save_pretrained(ANOTHER), with dequantize=True in CONFIG."
        )
    return "Give the checkpoint that was quantized."
