"""A small Llama, the layouts over which it is trained, and the formulas of their bytes."""

from functools import cache
from typing import NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp.devices.collective_bytes import least_sent
from nxdpp.planning import layout as planned_layout
from nxdpp.planning.configured_model import microbatch_on_meta
from nxdpp.planning.machine import DEVICES, Job, Machine
from nxdpp.planning.model_costs import ModelCosts
from nxdpp.planning.predict import Prediction, predict

FLOAT = 4


class Layout(NamedTuple):
    """Sizes of the dimensions.

    With ``zero1`` the replicas share the optimizer state, with ``sequence`` a tensor group divides the sequence.
    """

    tensor: int
    pipeline: int
    data: int
    zero1: bool = False
    sequence: bool = False

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        kinds = f"{' sequence' if self.sequence else ''}{' ZeRO-1' if self.zero1 else ''}"
        return f"{self.tensor} x {self.pipeline} x {self.data}{kinds}"


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
def plan(layout: Layout, shape: Shape) -> Prediction:
    """Return the prediction of the layout, whose stages have equal numbers of layers."""
    with torch.device("meta"):
        model = LlamaForCausalLM(shape.config())
    samples = shape.batch * shape.microbatches * layout.data
    job = Job(samples, lambda size: microbatch_on_meta(model, size, shape.length))
    costs = ModelCosts(model, Machine(layout.ranks, 2**40, DEVICES["cpu"]), job)
    wanted = planned_layout.Layout(
        layout.tensor,
        layout.pipeline,
        layout.data,
        microbatch=shape.batch,
        zero=int(layout.zero1),
        sequence=layout.sequence,
    )
    # The last stage has the head too.
    ends = [shape.layers * (stage + 1) // layout.pipeline for stage in range(layout.pipeline)]
    return predict(costs, wanted, [*ends[:-1], shape.layers + 1], shorten=False)


def least_bytes(layout: Layout, shape: Shape, planned: Prediction, stage: int) -> dict[str, float]:
    """Return the least bytes that a rank of ``stage`` sends in a step, by dimension.

    - pipeline: hidden states to the next stage, and their gradients to the stage before, of each microbatch; this
      rank's part of the sequence under sequence parallelism.
    - tensor: of a layer four all-reduces of hidden states, for its two halves and for their gradients; under
      sequence parallelism as many bytes in reduce-scatters and all-gathers. Also the embedding's output, the gradient
      of the head's input, and three numbers a token in the loss. Norms that see a part of the sequence add their
      gradients up once a step.
    - data: an all-reduce of the gradients; with ZeRO-1 the same bytes as reduce-scatter and all-gather.
    """
    is_first, is_last = stage == 0, stage == layout.pipeline - 1
    tokens = shape.batch * shape.length * FLOAT
    states = tokens * shape.hidden
    sent_states = states / layout.tensor if layout.sequence else states
    layers = shape.layers * (stage + 1) // layout.pipeline - shape.layers * stage // layout.pipeline
    reduced = states * (4 * layers + is_first + is_last) + tokens * 3 * is_last
    norms = 2 * layers * shape.hidden * FLOAT if layout.sequence else 0
    return {
        "pipeline": shape.microbatches * sent_states * ((not is_first) + (not is_last)),
        "tensor": least_sent("all_reduce", shape.microbatches * reduced + norms, layout.tensor),
        "data": least_sent("all_reduce", planned.memory[stage].gradients, layout.data),
    }
