"""A small Llama, the layouts over which it is trained, and the formulas of their bytes."""

from functools import cache
from typing import NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp.parallel_layers.collective_bytes import least_sent
from nxdpp.pipeline.planning.dimensions import Dimensions, divided
from nxdpp.pipeline.planning.stage_summary import StageSummary, summarise_stages

FLOAT = 4


class Layout(NamedTuple):
    """Sizes of the dimensions; with ``zero1`` the replicas share the optimizer state."""

    tensor: int
    pipeline: int
    data: int
    zero1: bool = False

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        return f"{self.tensor} x {self.pipeline} x {self.data}{' ZeRO-1' if self.zero1 else ''}"


class Shape(NamedTuple):
    """Sizes of the model and of a replica's batch: ``microbatches`` of ``(batch, length)`` tokens."""

    hidden: int = 128
    middle: int = 256
    layers: int = 4
    heads: int = 4
    vocabulary: int = 512
    batch: int = 2
    length: int = 64
    microbatches: int = 4

    def config(self) -> LlamaConfig:
        """Return the configuration of the model."""
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.middle,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads // 2,
            max_position_embeddings=self.length,
            use_cache=False,
        )

    def model(self) -> LlamaForCausalLM:
        """Return the model, with the same values on each rank."""
        torch.manual_seed(0)
        return LlamaForCausalLM(self.config())

    def inputs(self, replica: int) -> dict[str, torch.Tensor]:
        """Return a step's batch of one replica."""
        generator = torch.Generator().manual_seed(replica)
        ids = torch.randint(self.vocabulary, (self.batch * self.microbatches, self.length), generator=generator)
        return {"input_ids": ids, "labels": ids}


@cache
def plan(layout: Layout, shape: Shape) -> list[StageSummary]:
    """Return what ``python -m nxdpp plan`` prints of the layout."""
    with torch.device("meta"):
        model = LlamaForCausalLM(shape.config())
    ids = torch.empty(shape.batch, shape.length, dtype=torch.int64, device="meta")
    inputs = {"input_ids": ids, "labels": ids}
    sizes = Dimensions(layout.tensor, layout.data, layout.zero1)
    with divided(model, layout.tensor):
        return summarise_stages(model, inputs, layout.pipeline, shape.microbatches, sizes=sizes)


def least_bytes(layout: Layout, shape: Shape, planned: StageSummary, stage: int) -> dict[str, float]:
    """Return the least bytes that a rank of ``stage`` sends in a step, by dimension.

    - pipeline: hidden states to the next stage, and their gradients to the stage before, of each microbatch.
    - tensor: of a layer four all-reduces of hidden states, those of its two halves and of their gradients. Also the
      embedding's output, the gradient of the head's input, and three numbers a token in the loss.
    - data: an all-reduce of the gradients; with ZeRO-1 the same bytes as reduce-scatter and all-gather.
    """
    is_first, is_last = stage == 0, stage == layout.pipeline - 1
    tokens = shape.batch * shape.length * FLOAT
    states = tokens * shape.hidden
    layers = len(planned.layers)
    reduced = states * (4 * layers + is_first + is_last) + tokens * 3 * is_last
    return {
        "pipeline": float(shape.microbatches * states * ((not is_first) + (not is_last))),
        "tensor": shape.microbatches * least_sent("all_reduce", reduced, layout.tensor),
        "data": least_sent("all_reduce", planned.state.gradients, layout.data),
    }
