"""Tokens a second of a Llama, next to hand-cut stages and to one process."""

import os
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from benchmarks.comparison.contenders import NXDPP, TORCH, Contender, check_step, make_contenders
from benchmarks.comparison.job import Job
from benchmarks.comparison.rows import Entrant, Row, case_rows
from benchmarks.comparison.timing import Effort, Times, time_contenders
from nxdpp.ranks import parallel_state
from tests.support.run_ranks import run_ranks

SECTION = "llama"
RANKS = (2, 4)
HIDDEN, LAYERS, SEQUENCE, VOCABULARY = 256, 8, 128, 512
MICROBATCHES, MICROBATCH = 8, 2
ALONE = "one process"


def measure(effort: Effort) -> list[Row]:
    """A case for each number of ranks; a higher value is better."""
    rows: list[Row] = []
    tokens = MICROBATCHES * MICROBATCH * SEQUENCE
    for ranks in RANKS:
        times = run_ranks(ranks, _run_rank, ranks, effort, timeout=300 + 30 * effort.steps)[0]
        speeds = {entrant: [tokens / wall for wall in taken.wall] for entrant, taken in times.items()}
        case = f"p={ranks}, {MICROBATCHES} x {MICROBATCH} x {SEQUENCE} tokens"
        rows += case_rows(SECTION, case, "tokens/s", speeds, _others)
    return rows


class Alone(Contender):
    """One process that accumulates the microbatches, on the first rank; the others wait."""

    def __init__(self, job: Job, threads: int, rank: int) -> None:
        super().__init__(f"{ALONE}, {threads} threads" if threads > 1 else ALONE, "none")
        self._job = job
        self._threads = threads
        self._model = job.make_model() if rank == 0 else None

    def step(self) -> torch.Tensor | None:
        """Run all microbatches on the first rank."""
        if self._model is None:
            return None
        torch.set_num_threads(self._threads)
        loss = self._job.run_in_one_process(self._model)
        torch.set_num_threads(1)
        return loss

    def parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """All parameters, on the first rank."""
        return [] if self._model is None else self._model.named_parameters()


class LlamaStage(nn.Module):
    """One stage of a Llama, cut by hand: embedding first, equal numbers of layers, norm and head last."""

    def __init__(self, llama: nn.Module, stage: int, stages: int) -> None:
        super().__init__()
        assert isinstance(llama, LlamaForCausalLM), "llama_job makes a Llama"
        body = llama.model
        each = len(body.layers) // stages
        self.model = cast(Any, nn.Module())
        self.model.embed_tokens = body.embed_tokens if stage == 0 else None
        self.model.layers = nn.ModuleDict(
            {str(index): body.layers[index] for index in range(stage * each, (stage + 1) * each)}
        )
        self.model.norm = body.norm if stage == stages - 1 else None
        self.model.rotary_emb = body.rotary_emb
        self.lm_head = llama.lm_head if stage == stages - 1 else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """From token ids (B, T) or hidden states (B, T, H) to hidden states or logits (B, T, V)."""
        model = self.model
        if model.embed_tokens is not None:
            hidden = model.embed_tokens(hidden)
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        rotations = model.rotary_emb(hidden, positions)
        for layer in model.layers.values():
            hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotations)
        if self.lm_head is None:
            return hidden
        logits: torch.Tensor = self.lm_head(model.norm(hidden))
        return logits


class LlamaSize(NamedTuple):
    """Sizes of a Llama and of its batch."""

    hidden: int = HIDDEN
    layers: int = LAYERS
    heads: int = 4
    vocabulary: int = VOCABULARY
    sequence: int = SEQUENCE
    microbatches: int = MICROBATCHES
    microbatch: int = MICROBATCH


def llama_job(size: LlamaSize | None = None, device: str | torch.device = "cpu") -> Job:
    """A Llama with random weights, in host memory, and random tokens on ``device``."""
    size = size or LlamaSize()
    config = LlamaConfig(
        vocab_size=size.vocabulary, hidden_size=size.hidden, intermediate_size=4 * size.hidden,
        num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=size.heads,
        max_position_embeddings=size.sequence, use_cache=False,
    )  # fmt: skip

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        return LlamaForCausalLM(config)

    torch.manual_seed(1)
    ids = torch.randint(size.vocabulary, (size.microbatches * size.microbatch, size.sequence)).to(device)
    function = LlamaForCausalLM(config).loss_function
    return Job(
        make_model=make_model,
        layer_class=LlamaDecoderLayer,
        cut=LlamaStage,
        loss=lambda logits, labels: function(logits=logits, labels=labels, vocab_size=size.vocabulary),
        inputs={"input_ids": ids, "labels": ids},
        first_input=ids,
        target=ids,
        hidden=(size.microbatch, size.sequence, size.hidden),
        microbatches=size.microbatches,
    )


def _run_rank(rank: int, ranks: int, effort: Effort) -> dict[Entrant, Times]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    job = llama_job()
    loss, gradients = job.reference()
    cores = max(2, len(os.sched_getaffinity(0)))
    contenders: list[Contender] = [Alone(job, 1, rank), Alone(job, cores, rank)]
    for family, chunks in (("1f1b", 1), ("interleaved", 2)):
        for contender in make_contenders(job, family, chunks):
            check_step(contender, loss, gradients)
            contenders.append(contender)
    return time_contenders(contenders, effort)


def _others(contender: str, family: str) -> dict[Entrant, float | None]:
    return {(TORCH, family): None, (ALONE, "none"): None} if contender == NXDPP else {}
