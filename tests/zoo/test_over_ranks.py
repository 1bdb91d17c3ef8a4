"""Types with different constructs, trained over several processes and compared with one process.

``python -m tools.zoo training`` compares all types in one process.
"""

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from tests.support.models import gradient_differences, reference, train_in_one_process
from tests.support.run_ranks import run_ranks
from tools.zoo import ARGUMENTS, build, inputs

MICROBATCHES = 2
PADDED = 1
Types = dict[str, tuple[str, ...]]
TWO_STAGES: Types = {
    "causal-lm": (
        "gemma3_text",  # a mask for each type of layer, scaled embeddings
    ),
    "seq2seq-lm": (
        "t5gemma",  # a rotary table of the decoder, which later stages alone need
    ),
}
MORE_ON_TWO_STAGES: Types = {
    "causal-lm": (
        "bloom",  # alibi
        "deepseek_v3",  # compressed attention, routed and shared experts
        "falcon",  # attention and feed-forward side by side
        "falcon_mamba",  # state space
        "gpt2",  # learned positions, tied head
        "gpt_neo",  # local and global attention
        "gpt_oss",  # attention sinks, experts
        "jamba",  # attention, state space and experts in turn
        "lfm2",  # convolutions and attention
        "mamba",  # state space
        "mistral",  # sliding window
        "mixtral",  # experts
        "mpt",  # alibi, another tie
        "starcoder2",  # biases, a window
        "recurrent_gemma",  # recurrence
        "fuyu",  # the text part of a multimodal model
        "opt",  # positions from the mask
        "qwen3_next",  # linear attention
    ),
    "masked-lm": (
        "bert",  # tied head with a bias
        "funnel",  # slices of the hidden state that a test of its type comes before
        "ibert",  # an output that data decide to be None
        "modernbert",  # local and global attention
        "mpnet",  # a bias of positions, computed once for all layers
        "roformer",  # rotary positions from a sinusoid table
    ),
    "seq2seq-lm": (
        "bart",  # encoder and decoder, an embedding tied three times
        "t5",  # a bias of positions that the first layer gives to the others
        "qwen2_audio",  # the text part of a multimodal model
    ),
    "image-classification": (
        "beit",  # a bias of positions in each layer
        "convnext",  # no attention
        "efficientnet",  # batch norm
        "swin",  # windows, sizes that change from layer to layer
        "vit",
    ),
}


def train(rank: int, types: Types) -> dict[str, list[str]]:
    """Differences of each type from one process."""
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    wrong = {}
    for task, names in types.items():
        for name in names:
            wrong[name] = differences(task, name)
    return wrong


def differences(task: str, name: str) -> list[str]:
    model = build(task, name)
    batches = [inputs(task, model, shape) for shape in (PADDED, 0)]
    whole = without_cache(reference(model))
    arguments: dict[str, Any] = dict(ARGUMENTS.get(name, {}))
    wrapped = NxDPPModel(model, num_microbatches=MICROBATCHES, broadcast_and_average_loss=True, **arguments)
    wrong = []
    for batch in batches:
        loss = wrapped.run_train(**batch)
        expected = torch.stack(train_in_one_process(whole, batch, MICROBATCHES)).mean()
        if not isinstance(loss, torch.Tensor) or not torch.equal(loss, expected):
            wrong.append(f"loss {loss} instead of {expected}")
    return wrong + wrong_gradients(wrapped, whole)


def without_cache(model: nn.Module) -> nn.Module:
    """Turn off caches, which change the memory order of keys. Submodels have their own configurations."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = False
    return model


def wrong_gradients(wrapped: NxDPPModel, whole: nn.Module) -> list[str]:
    """Gradients that differ, except for rounding of a tied weight and zeros for a gradient that one process lacks."""
    gradients = dict(wrapped.local_named_parameters())
    expected = dict(whole.named_parameters(remove_duplicate=False))
    uses = Counter(id(parameter) for parameter in expected.values())
    wrong = []
    for name, distance in gradient_differences(wrapped, whole).items():
        gradient = gradients[name].grad
        is_zero = expected[name].grad is None and gradient is not None and not gradient.any()
        is_tied = uses[id(expected[name])] > 1 and distance is not None and distance < 1e-6
        if not is_zero and not is_tied:
            wrong.append(f"{name} by {distance}")
    return wrong


@pytest.mark.parametrize(
    "types",
    [
        pytest.param(TWO_STAGES, id="two stages"),
        pytest.param(MORE_ON_TWO_STAGES, id="more on two stages", marks=pytest.mark.sweep),
    ],
)
def test_types_train_as_in_one_process(types: Types) -> None:
    exact: dict[str, list[str]] = {name: [] for names in types.values() for name in names}
    for rank in run_ranks(2, train, types):
        assert rank == exact
