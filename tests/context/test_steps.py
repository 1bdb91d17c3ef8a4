"""Steps over context ranks have one process's losses and gradients, in each layout."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import nxdpp
from nxdpp import NxDPPModel, context_parallelize, parallel_state
from nxdpp.initialization.parts import own_part
from nxdpp.tensor.models.comparison import Float64, to_float64
from tests.support.run_ranks import run_ranks
from tests.support.whole_numbers import whole as whole_rows

MICROBATCHES = 2
LIMIT = 1e-12
VOCABULARY = 38
_SIZES: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4},
    **{"num_hidden_layers": 4, "use_cache": False, "pad_token_id": 0},
}
_EAGER: dict[str, Any] = {"attn_implementation": "eager"}
_THREE: dict[str, Any] = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}
_SPARSE: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, num_key_value_heads=2)),
    "eager": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, **_EAGER, num_key_value_heads=2)),
    "three heads": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES | _THREE)),
    "three heads, eager": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES | _THREE | _EAGER)),
    "window": lambda: MistralForCausalLM(MistralConfig(**_SIZES, num_key_value_heads=4, sliding_window=5)),
    "sinks": lambda: GptOssForCausalLM(GptOssConfig(**_SIZES, **_SPARSE, head_dim=8, num_key_value_heads=2)),
    "experts": lambda: MixtralForCausalLM(MixtralConfig(**_SIZES, **_SPARSE, num_key_value_heads=4)),
}


def batch_of(replica: int, length: int, packed: bool = False, is_padded: bool = True) -> dict[str, Tensor]:
    """Four rows of ``length`` tokens, padded on both sides; or two packed sequences in a row."""
    generator = torch.Generator().manual_seed(replica)
    ids = torch.randint(1, VOCABULARY, (2 * MICROBATCHES, length), generator=generator)
    if packed:
        starts = length // 3
        positions = torch.cat([torch.arange(starts), torch.arange(length - starts)]).expand_as(ids)
        return {"input_ids": ids, "labels": ids, "position_ids": positions}
    if not is_padded:
        return {"input_ids": ids, "labels": ids}
    mask = torch.ones_like(ids)
    mask[1, -4:], mask[2, :3] = 0, 0
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def _made(name: str) -> Any:
    torch.manual_seed(0)
    return to_float64(MODELS[name]())


def _alone(name: str, batches: list[dict[str, Tensor]], normalization: str) -> tuple[float, Any]:
    """The loss of one process over the batches of all replicas, and its model with gradients."""
    model, total = _made(name), 0.0
    parts = [{k: v.chunk(MICROBATCHES)[i] for k, v in batch.items()} for batch in batches for i in range(MICROBATCHES)]
    items = [int((part["labels"][:, 1:] != -100).sum()) for part in parts]
    for part, count in zip(parts, items, strict=True):
        share = count / sum(items) if normalization == "tokens" else 1 / len(parts)
        with Float64():
            loss = model(**part).loss * share
            loss.backward()
        total += float(loss)
    return total, model


def differences(
    rank: int,
    model: str,
    layout: Mapping[str, Any],
    length: int = 13,
    packed: bool = False,
    is_padded: bool = True,
    first: Callable[[Any], Any] = lambda module: module,
    before: Callable[[Any], Any] = lambda module: module,
    after: Callable[[Any], Any] = lambda wrapped: None,
    **settings: Any,
) -> dict[str, float]:
    """Differences above rounding of the loss and of this rank's gradients."""
    parallel_state.initialize_model_parallel(**layout)
    wrapped = NxDPPModel(
        before(context_parallelize(first(_made(model)))),
        num_microbatches=MICROBATCHES,
        broadcast_and_average_loss=True,
        **settings,
    )
    after(wrapped)
    replicas, replica = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
    batches = [batch_of(each, length, packed, is_padded) for each in range(replicas)]
    with Float64():
        loss = wrapped.run_train(**batches[replica])
    expected, alone = _alone(model, batches, settings.get("loss_normalization", "microbatch"))
    found = {"loss": float(loss) - expected}
    for name, parameter in wrapped.local_named_parameters():
        theirs = alone.get_parameter(name).grad
        assert theirs is not None, name
        assert parameter.grad is not None, name
        ours = whole_rows(parameter.grad)
        theirs = theirs if ours.shape == theirs.shape else own_part(theirs, parameter)
        found[name] = float((ours - theirs).abs().max())
    return {name: value for name, value in found.items() if not abs(value) <= LIMIT}


_TWO: dict[str, Any] = {"context_parallel_size": 2}
_STAGES: dict[str, Any] = {"context_parallel_size": 2, "pipeline_model_parallel_size": 2}
_FOUR: dict[str, Any] = {"context_parallel_size": 4}
CASES: dict[str, tuple[int, Callable[[int], Any]]] = {
    "a length that does not divide": (2, partial(differences, model="llama", layout=_TWO)),
    "eager": (2, partial(differences, model="eager", layout=_TWO)),
    "fewer tokens than pieces": (2, partial(differences, model="llama", layout=_TWO, length=5)),
    "a sliding window": (2, partial(differences, model="window", layout=_TWO, length=16)),
    "sinks of heads": (2, partial(differences, model="sinks", layout=_TWO)),
    "packed sequences": (2, partial(differences, model="llama", layout=_TWO, packed=True)),
    "recomputed layers": (2, partial(differences, model="llama", layout=_TWO, after=nxdpp.apply_checkpoint)),
    "shards": (2, partial(differences, model="llama", layout=_TWO, after=nxdpp.fully_shard)),
    "experts over the same ranks": (
        2,
        partial(
            differences,
            model="experts",
            layout={"context_parallel_size": 2, "expert_model_parallel_size": 2},
            before=nxdpp.expert_parallelize,
        ),
    ),
    "heads that do not divide": (2, partial(differences, model="three heads", layout=_TWO)),
    "heads that do not divide, without a mask": (
        2,
        partial(differences, model="three heads", layout=_TWO, is_padded=False),
    ),
    "heads that do not divide, eager": (2, partial(differences, model="three heads, eager", layout=_TWO)),
    "fewer heads of keys than ranks": (4, partial(differences, model="llama", layout=_FOUR)),
    "1f1b": (4, partial(differences, model="llama", layout=_STAGES)),
    "zb1p": (4, partial(differences, model="llama", layout=_STAGES, schedule="zb1p")),
    "interleaved": (4, partial(differences, model="llama", layout=_STAGES, virtual_pipeline_size=2)),
    "dualpipe-v": (4, partial(differences, model="llama", layout=_STAGES, schedule="dualpipe-v")),
    "replicas and token losses": (
        4,
        partial(differences, model="llama", layout=_TWO, loss_normalization="tokens"),
    ),
    "tensor-parallel ranks": (
        4,
        partial(
            differences,
            model="llama",
            layout={"context_parallel_size": 2, "tensor_model_parallel_size": 2},
            before=nxdpp.tensor_parallelize,
        ),
    ),
    "a head that tensor-parallel ranks divide": (
        4,
        partial(
            differences,
            model="llama",
            layout={"context_parallel_size": 2, "tensor_model_parallel_size": 2},
            first=nxdpp.tensor_parallelize,
        ),
    ),
    "stages, experts and replicas": (
        8,
        partial(
            differences,
            model="experts",
            layout={"pipeline_model_parallel_size": 2, "context_parallel_size": 2, "expert_model_parallel_size": 4},
            before=nxdpp.expert_parallelize,
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_context_ranks_have_the_numbers_of_one_process(case: str) -> None:
    ranks, run = CASES[case]
    assert run_ranks(ranks, run) == [{}] * ranks
