"""The training: a Hugging Face model as a pipeline of nxdpp.

Comments that start with "nxdpp" mark the lines that your own script needs.
"""

import math
from typing import Any, Literal

import torch
import torch.distributed as dist
import transformers
from ctrl_c import CtrlC, Interrupted
from figures import RankFigures, StepFigures, print_figures
from first_ctrl_c import STATUS
from learning_rate import advice, learning_rate_factor
from numbers_of_ranks import numbers_of_all_ranks
from one_process import measure_one_process
from report import NO_METRICS, TrainingReport, holds_a_run, print_stage_table, settle_metrics
from resuming import (
    check_resume,
    checkpoint_to_resume,
    finish,
    go_on_or_end,
    is_due,
    lines_of_interrupt,
    resume,
    save,
)
from rich.console import Console
from sample import print_sample
from settings import Settings, refuse
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from windows import RandomWindows, held_out_batches

from nxdpp import (
    NxDPPModel,
    deferred_init,
    fully_shard,
    init_on_device,
    load_pretrained,
    parallel_state,
    save_pretrained,
    tensor_parallelize,
)
from nxdpp.optimizer import Zero1Optimizer

HELD_OUT_SEQUENCES = 128


def prepare(settings: Settings) -> None:
    """Check what needs torch: the model's config, and the checkpoint to resume from. Raises ``ValueError``."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    assert settings.config is not None
    check_resume(settings)


def run(settings: Settings, ctrl_c: CtrlC) -> int:
    """Train, save, sample and compare; collective over all ranks. Returns the exit status."""
    start(settings)
    # Brackets and colons in a path are no markup.
    console = Console(quiet=dist.get_rank() != 0, markup=False, emoji=False)
    device, replicas = parallel_state.local_device(), parallel_state.get_data_parallel_size()
    figures: list[RankFigures] = []
    lines: tuple[str, ...] = ()
    try:
        figures = train(settings, console, ctrl_c)
    except Interrupted as interrupted:
        lines = interrupted.lines
    # nxdpp: the end of the ranks' work together; only rank 0 does what follows.
    parallel_state.destroy_model_parallel()
    if lines:
        for line in lines:
            console.print(line, highlight=False, soft_wrap=True)
        return STATUS
    if not console.quiet:
        ctrl_c.lines = (f"interrupted after step {settings.steps} of {settings.steps}", saved(settings))
        ctrl_c.end_deferral()
        print_sample(console, settings)
        if not figures:
            names = "no figures, and none of --compare" if settings.compare else "no figures"
            said = f"{names}: they leave the first step out, and fewer than two were run"
            console.print(said, highlight=False, soft_wrap=True)
        elif settings.compare:
            compared = measure_one_process(settings, device, replicas * settings.num_microbatches)
            print_figures(console, settings, figures, compared)
        else:
            print_figures(console, settings, figures, None)
    return 0


def train(settings: Settings, console: Console, ctrl_c: CtrlC) -> list[RankFigures]:
    """Train and save, and return the figures of each rank; collective over all ranks.

    Raises ``Interrupted`` on all ranks after a Ctrl-C.
    """
    torch.manual_seed(settings.seed)
    # nxdpp: wrap the model; each rank keeps its own layers.
    model = NxDPPModel(
        # nxdpp: each tensor-parallel rank keeps its part of the layers.
        tensor_parallelize(model_without_memory(settings), sequence_parallel=settings.sequence_parallel),
        transformer_layer_cls=LlamaDecoderLayer,
        num_microbatches=settings.num_microbatches,
        broadcast_and_average_loss=True,
        # nxdpp: the mean over all bytes of the batch, however many of them each microbatch has.
        loss_normalization="tokens",
        use_zero1_optimizer=settings.zero1,
        # nxdpp: the order of forwards and backwards, and the stages of each rank.
        schedule=settings.schedule,
        virtual_pipeline_size=settings.virtual_pipeline_size,
        # nxdpp: cuts by equal numbers of layers, by counted or by measured cost; costs are of one microbatch.
        partition=settings.partition,
        partition_batch=None if settings.partition == "even" else microbatch_without_memory(settings),
        # nxdpp: a Chrome trace of each step.
        trace_file_path=None if settings.trace is None else str(settings.trace),
    )
    found = checkpoint_to_resume(settings)
    if settings.shard is not None:
        # nxdpp: each replica keeps a part of weights, gradients and the optimizer's state.
        fully_shard(model, reshard_after_forward=settings.shard == "microbatch")
    if settings.pretrained is not None and found is None:
        # nxdpp: each rank reads its own layers, and of shards its rows, into float32 from any width.
        load_pretrained(model, settings.pretrained, convert_dtype=True)
    model.move_model_to_device()
    optimizer = make_optimizer(model, settings)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, settings.steps))

    if dist.get_rank() == 0:
        settle_metrics(settings.output)
    # nxdpp: resume from a checkpoint of any layout of ranks.
    earlier = resume(settings, found, model, optimizer, schedule, console) if found else NO_METRICS
    done = len(earlier)
    if not done and holds_a_run(settings.output):
        said = f"{settings.output} holds an earlier run, which stays until this one saves, and is then replaced"
        console.print(said, highlight=False, soft_wrap=True)
    print_stage_table(console, model)
    loss_before = held_out_loss(model, settings, ctrl_c)
    if loss_before is None:
        raise Interrupted(lines_of_interrupt(settings, done))
    when = f"after step {done}" if done else "before training"
    console.print(f"held-out loss {when}: {loss_before:.3f}", highlight=False)
    figures = StepFigures(model)
    with TrainingReport(console, settings.output, settings.steps, model, earlier) as report:
        for step, ids in enumerate(training_batches(settings, done), done + 1):
            loss = loss_with_gradients(model, ids, settings, console).item()
            if not math.isfinite(loss):
                raise RuntimeError(f"the loss of step {step} is {loss}: {advice(step)}")
            if not settings.zero1:
                # nxdpp: the norm of the whole model; torch's clip_grad_norm_ would see this rank's part.
                model.clip_grad_norm_(settings.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            tokens = settings.batch_size * settings.seq_length
            # The ranks hear of a Ctrl-C at different times, and end after the same step.
            ends = report.step_done(step, loss, tokens, model.last_busy_share, ctrl_c.requested)
            figures.step_done()
            if is_due(settings, step) or (ends and settings.checkpoint_every):
                # nxdpp: each rank writes its own part of weights and optimizer.
                save(settings, step, model, optimizer, schedule, report.metrics(step), console)
                figures.saved()
            if ends and step < settings.steps:
                finish(settings, console)
                raise Interrupted(lines_of_interrupt(settings, step))
        finish(settings, console)
        loss_after = held_out_loss(model, settings, ctrl_c)
        if loss_after is not None:
            report.add(held_out_loss=loss_after)
    if loss_after is not None:
        console.print(f"held-out loss after training: {loss_after:.3f}", highlight=False)

    # nxdpp: save a Hugging Face checkpoint; each rank writes its own layers.
    with report.saving():
        save_pretrained(model, settings.output)
    if loss_after is None:
        raise Interrupted((f"interrupted after step {settings.steps} of {settings.steps}", saved(settings)))
    console.print(saved(settings), highlight=False, soft_wrap=True)
    if settings.trace is not None and done < settings.steps:
        # The trace has the evaluation before the training too.
        last = held_out_count(settings) + settings.steps - done - 1
        said = f"https://ui.perfetto.dev shows the last training step: step {last} of {settings.trace}"
        console.print(said, highlight=False, soft_wrap=True)
    return figures.of_all_ranks()


def saved(settings: Settings) -> str:
    """A line that names the files of a whole run."""
    return f"checkpoint and metrics.jsonl are in {settings.output}"


def start(settings: Settings) -> None:
    """Start the processes' groups; a device that cannot be used ends this process with status 2."""
    try:
        # nxdpp: number of processes in one pipeline; further pipelines are data-parallel replicas.
        parallel_state.initialize_model_parallel(
            # nxdpp: number of processes that share each layer.
            tensor_model_parallel_size=settings.tensor_parallel_size,
            pipeline_model_parallel_size=settings.pipeline_parallel_size,
            # nxdpp: None for a CUDA device where there is one, and else the CPU.
            device=settings.device,
        )
    except (ValueError, RuntimeError) as error:
        refuse(error)


def model_without_memory(settings: Settings) -> LlamaForCausalLM:
    """Build the model without memory: each rank materialises only its own layers when it is wrapped."""
    if settings.pretrained is not None:
        with init_on_device(torch.device("meta")):
            return LlamaForCausalLM(settings.config)
    # nxdpp: the initial weights are as LlamaForCausalLM(settings.config) makes them.
    return deferred_init(LlamaForCausalLM, settings.config)


def microbatch_without_memory(settings: Settings) -> dict[str, torch.Tensor]:
    """Inputs of one microbatch by name, ``(B, T)`` each, for the costs of the layers; only their shapes count."""
    replicas = parallel_state.get_data_parallel_size()
    sequences = settings.batch_size // (replicas * settings.num_microbatches)
    ids = torch.empty(sequences, settings.seq_length, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


def make_optimizer(model: NxDPPModel, settings: Settings) -> torch.optim.Optimizer:
    """AdamW over this rank's weights; with ``--zero1`` each replica keeps a part of its state, and it clips."""
    weights = [parameter for _, parameter in model.local_named_parameters()]
    options: dict[str, Any] = {"lr": settings.learning_rate, "betas": (0.9, 0.99)}
    if settings.zero1:
        return Zero1Optimizer(weights, torch.optim.AdamW, max_norm=settings.max_grad_norm, **options)
    return torch.optim.AdamW(weights, **options)


def loss_with_gradients(
    model: NxDPPModel[Literal[True]], ids: torch.Tensor, settings: Settings, console: Console
) -> torch.Tensor:
    """Loss of a batch ``(B, T)`` in host memory, whose gradients are added up."""
    with autocast(settings):
        try:
            # nxdpp: forward and backward of all microbatches; gradients are in .grad as usual.
            loss = model.run_train(input_ids=ids, labels=ids)
        except ConnectionError:
            raise
        except OSError as error:
            # nxdpp: a save in the background has failed; the step raises it on all ranks before it begins.
            go_on_or_end(settings, error, console)
            loss = model.run_train(input_ids=ids, labels=ids)
    return loss


def training_batches(settings: Settings, done: int) -> DataLoader[torch.Tensor]:
    """Batches ``(B, T)`` of this data-parallel replica, one for each step after the first ``done``.

    All ranks of the replica get the same batches.
    """
    count = settings.steps * settings.batch_size
    windows = RandomWindows(
        settings.corpus.train, count, settings.seq_length, settings.seed, done * settings.batch_size
    )
    replicas, replica = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
    # The positions are random already.
    sampler: DistributedSampler[Any] = DistributedSampler(windows, replicas, replica, shuffle=False)
    # With a generator of its own, the loader draws nothing from the one that dropout continues with.
    generator = torch.Generator()
    return DataLoader(windows, batch_size=settings.batch_size // replicas, sampler=sampler, generator=generator)


def held_out_loss(model: NxDPPModel, settings: Settings, ctrl_c: CtrlC) -> float | None:
    """Mean loss on the held-out text; ``None`` after a Ctrl-C. Collective over all ranks."""
    count = held_out_count(settings)
    losses: list[float] = []
    model.eval()
    for batch in held_out_batches(settings.corpus.held_out, settings.batch_size, settings.seq_length, count):
        if numbers_of_all_ranks([float(ctrl_c.requested)]).any():
            return None
        ids = local_part(batch)
        with autocast(settings):
            losses.append(model.run_eval(input_ids=ids, labels=ids).item())
    model.train()
    return sum(losses) / len(losses)


def held_out_count(settings: Settings) -> int:
    """Number of batches of an evaluation."""
    return max(1, HELD_OUT_SEQUENCES // settings.batch_size)


def local_part(batch: torch.Tensor) -> torch.Tensor:
    """Sequences of this data-parallel replica, ``(B, T)`` with B divided by the replicas."""
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_size()
    return batch.chunk(replicas)[replica]


def autocast(settings: Settings) -> torch.autocast:
    """Context for bfloat16 forwards with ``--dtype bfloat16``."""
    return torch.autocast(parallel_state.local_device().type, torch.bfloat16, enabled=settings.dtype == "bfloat16")
