"""Tiny models and their checkpoints, written and read by transformers for comparison."""

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from tests.support.models import MODELS
from tools.zoo import build


def make(name: str, seed: int = 1234, **changes: Any) -> Any:
    """The model ``name`` with random weights from ``seed``, also in norms and biases."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = build("seq2seq-lm", "t5") if name == "t5" else MODELS[name](**changes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def on_meta(name: str) -> Any:
    if name == "t5":
        return build("seq2seq-lm", "t5", "meta")
    with torch.device("meta"):
        return MODELS[name]()


def saved_by_transformers(name: str, folder: Path, **arguments: Any) -> Any:
    """Write the model ``name`` to ``folder`` and return it."""
    model = make(name)
    model.save_pretrained(folder, **arguments)
    return model


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the safetensors files in ``folder``."""
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def wrap(model: nn.Module, ranks: int = 1, **arguments: Any) -> NxDPPModel:
    """Wrap ``model`` for a pipeline of ``ranks``."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    return NxDPPModel(model, num_microbatches=ranks, **arguments)


def wrap_as(rank: int, ranks: int, model: nn.Module, **arguments: Any) -> NxDPPModel:
    """Wrap ``model`` as ``rank`` of a pipeline of ``ranks``, alone in this process."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_debug(pipeline_model_parallel_rank=rank, pipeline_model_parallel_size=ranks)
    return NxDPPModel(model, num_microbatches=ranks, **arguments)


def differing(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of the ``tensors`` that differ from the ``expected`` ones in values or dtype."""
    return [
        name
        for name, tensor in tensors.items()
        if tensor.dtype is not expected[name].dtype or not torch.equal(tensor.cpu(), expected[name].cpu())
    ]
