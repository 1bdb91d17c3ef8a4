"""Kernel fusion by OSLO's keys, through ``torch.compile`` in place.

::

    enable                                        each activation function is one kernel
    memory_efficient_fusion                       the whole model is compiled, and what its backward recomputes is
                                                  chosen by a minimum cut of the graph
    custom_cuda_kernels  FusedRMSNorm             each RMS norm is one kernel
                         FusedNoRepeatNGram       not built: a warning, and transformers' own processor
"""

import warnings
from collections.abc import Collection
from typing import Any

from torch import nn
from transformers.activations import ACT2CLS

from nxdpp.pipeline.layer_compilation import compile_modules

_RMS_NORMS = ("RMSNorm", "T5LayerNorm")
_entries: list[Any] = list(ACT2CLS.values())
_ACTIVATIONS: tuple[type[nn.Module], ...] = tuple({each[0] if isinstance(each, tuple) else each for each in _entries})


def check_fusion(model: nn.Module, whole: bool, kernels: Collection[str]) -> None:
    """Raise ``ValueError`` for a fusion that would find no module in ``model``; warn for a kernel that is not built."""
    if not whole and not any(isinstance(module, _ACTIVATIONS) for module in model.modules()):
        raise ValueError(
            f'"kernel_fusion" compiles activation functions, and {type(model).__name__} has no module of one: leave it '
            'out, or add "memory_efficient_fusion": true, which compiles the whole model'
        )
    if "FusedRMSNorm" in kernels and not any(map(_is_rms_norm, model.modules())):
        raise ValueError(f'"custom_cuda_kernels": {type(model).__name__} has no RMS norm: leave FusedRMSNorm out')
    if "FusedNoRepeatNGram" in kernels:
        warnings.warn(
            "FusedNoRepeatNGram is not built: generate(no_repeat_ngram_size=...) gives the same tokens by the logits "
            "processor of transformers, which runs on the CPU",
            stacklevel=3,
        )


def fuse(module: nn.Module, whole: bool, kernels: Collection[str]) -> None:
    """Compile ``module``, or only its activation functions and RMS norms, in place; their first calls compile.

    Args:
        module: the modules of this rank.
        whole: compile all of ``module``.
        kernels: ``"FusedRMSNorm"`` compiles RMS norms too.
    """
    norms = "FusedRMSNorm" in kernels
    fused = (
        (name, each)
        for name, each in module.named_modules()
        if isinstance(each, _ACTIVATIONS) or (norms and _is_rms_norm(each))
    )
    compile_modules([("", module)] if whole else fused, {})


def _is_rms_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith(_RMS_NORMS)
