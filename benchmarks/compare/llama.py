"""Tokens a second of a real Llama, beside hand-split stages and beside one process."""

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from benchmarks.compare.alternation import take_turns
from benchmarks.compare.contender import PEER, US, Contender, check_step
from benchmarks.compare.field import Entry, makers
from benchmarks.compare.job import Job, run_one_process
from benchmarks.compare.rows import Row, Verdict, measured_row, median
from benchmarks.compare.session import Effort
from nxdpp.parallel_layers import parallel_state
from tests.support.run_ranks import run_ranks

SECTION = "llama"
RANKS = (2, 4)
HIDDEN, LAYERS, SEQUENCE, VOCABULARY = 256, 8, 128, 512
MICROBATCHES, MICROBATCH = 8, 2
ALONE = "one process"


class Alone(Contender):
    """One process that accumulates the microbatches, on the first rank; the others wait."""

    def __init__(self, job: Job, threads: int, rank: int) -> None:
        super().__init__(f"{ALONE}, {threads} threads" if threads > 1 else ALONE, "none")
        self._job = job
        self._threads = threads
        self._model = job.make_model() if rank == 0 else None

    def step(self) -> torch.Tensor | None:
        """Nothing, on the ranks that wait."""
        if self._model is None:
            return None
        torch.set_num_threads(self._threads)
        loss = run_one_process(self._model, self._job)
        torch.set_num_threads(1)
        return loss

    def parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """All of them."""
        return [] if self._model is None else self._model.named_parameters()


class LlamaStage(nn.Module):
    """Some of the layers of a Llama, cut by hand."""

    def __init__(self, llama: LlamaForCausalLM, own: range, first: bool, last: bool) -> None:
        super().__init__()
        body = llama.model
        self.model = nn.Module()
        self.model.embed_tokens = body.embed_tokens if first else None
        self.model.layers = nn.ModuleDict({str(index): body.layers[index] for index in own})
        self.model.norm = body.norm if last else None
        self.model.rotary_emb = body.rotary_emb
        self.lm_head = llama.lm_head if last else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """From token ids or hidden states to hidden states or logits."""
        model = self.model
        if model.embed_tokens is not None:
            hidden = model.embed_tokens(hidden)
        positions = torch.arange(hidden.shape[1]).unsqueeze(0)
        rotations = model.rotary_emb(hidden, positions)
        for layer in model.layers.values():
            hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotations)
        if self.lm_head is None:
            return hidden
        logits: torch.Tensor = self.lm_head(model.norm(hidden))
        return logits


def measure(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    """A case for each number of ranks."""
    rows: list[Row] = []
    for ranks in RANKS:
        say(f"{SECTION}: {ranks} ranks")
        found = run_ranks(ranks, run_rank, ranks, effort, timeout=300 + 30 * effort.steps)[0]
        rows += case_rows(ranks, found)
    return rows


def run_rank(rank: int, ranks: int, effort: Effort) -> list[Entry]:
    """One rank of a case: 1F1B of all who run it and, as two stages a rank, the interleaved one."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    job = llama_job()
    loss, gradients = job.reference()
    cores = max(2, len(os.sched_getaffinity(0)))
    contenders: list[Contender] = [Alone(job, 1, rank), Alone(job, cores, rank)]
    for family, chunks in (("1f1b", 1), ("interleaved", 2)):
        for _, make in makers(job, family, chunks):
            contenders.append(make())
            check_step(contenders[-1], loss, gradients)
    times = take_turns(contenders, effort)
    return [Entry(c.name, c.family, t) for c, t in zip(contenders, times, strict=True)]


def llama_job() -> Job:
    """A byte-level Llama of the size that the issue gives."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=SEQUENCE, use_cache=False,
    )  # fmt: skip

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        return LlamaForCausalLM(config)

    torch.manual_seed(1)
    ids = torch.randint(VOCABULARY, (MICROBATCHES * MICROBATCH, SEQUENCE))
    return Job(
        make_model=make_model,
        layer_class=LlamaDecoderLayer,
        cut=cut,
        loss=partial(_loss, LlamaForCausalLM(config).loss_function),
        inputs={"input_ids": ids, "labels": ids},
        first_input=ids,
        target=ids,
        hidden=(MICROBATCH, SEQUENCE, HIDDEN),
        microbatches=MICROBATCHES,
    )


def cut(model: nn.Module, stage: int, stages: int) -> nn.Module:
    """The same number of layers on each stage, the embedding on the first, norm and head on the last."""
    assert isinstance(model, LlamaForCausalLM), "the job made it"
    each = LAYERS // stages
    return LlamaStage(model, range(stage * each, (stage + 1) * each), stage == 0, stage == stages - 1)


def _loss(function: Callable[..., torch.Tensor], logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return function(logits=logits, labels=labels, vocab_size=VOCABULARY)


def case_rows(ranks: int, found: Sequence[Entry]) -> list[Row]:
    """Tokens a second; more is better."""
    case = f"p={ranks}, {MICROBATCHES} x {MICROBATCH} x {SEQUENCE} tokens"
    tokens = MICROBATCHES * MICROBATCH * SEQUENCE
    speeds = {(name, family): [tokens / wall for wall in times.wall] for name, family, times in found}
    rows = []
    for name, family, _ in found:
        beside = {PEER: speeds.get((PEER, family)), ALONE: speeds.get((ALONE, "none"))}
        values = speeds[name, family]
        verdicts = [
            Verdict(other, median(values) / median(theirs))
            for other, theirs in beside.items()
            if name == US and theirs is not None
        ]
        rows.append(measured_row(SECTION, case, family, name, "tokens/s", values, verdicts))
    return rows
