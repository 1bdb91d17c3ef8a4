"""Training of a byte-level Llama, or a Mixtral, on real text, on one process or as a pipeline of several.

    python examples/llama/train.py
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 examples/llama/train.py

All give the same losses, pipelines to the last bit. Comments that start with "nxdpp" mark the lines that make a
pipeline of a Hugging Face model. A token is a byte, so there is no tokenizer.
"""

import json
import math
import os
import sysconfig
import time
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import nxdpp
from nxdpp import MetricsFile, NxDPPModel, parallel_state
from nxdpp.optimizer import Zero1Optimizer

# A resumed training has the same batches and rates if these flags are the same.
SAME = ("config", "data", "steps", "batch_size", "seq_length", "learning_rate", "seed", "experts")


def read_flags() -> Namespace:
    """Return the flags of the command line."""
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--config", type=Path, help="config.json of a Llama of at least 256 tokens; else one of 5 M parameters")
    add("--data", type=Path, nargs="+", help="two or more files of text; else Python's standard library")
    add("--steps", type=int, default=240, help="optimizer steps")
    add("--batch-size", type=int, default=8, help="sequences in a step, over all replicas")
    add("--seq-length", type=int, default=128, help="bytes in a sequence")
    add("--num-microbatches", type=int, default=8, help="microbatches of each replica")
    add("--learning-rate", type=float, default=1.5e-3, help="highest rate, after a tenth of the steps")
    add("--seed", type=int, default=0, help="of the weights and the batches")
    add("--device", help="cpu, cuda, xla or another; without it a CUDA device where there is one, else the CPU")
    add("--output", type=Path, default=Path("runs/llama"), help="folder of metrics.jsonl and the trained model")
    add("--checkpoint-every", type=int, default=0, help="save the training after so many steps; 0 for never")
    add("--resume", action="store_true", help="resume from the newest checkpoint, or start without one")
    add("--pipeline-parallel-size", type=int, help="ranks of a pipeline; without it all")
    add("--tensor-parallel-size", type=int, default=1, help="ranks that share each layer")
    add("--experts", type=int, default=0, help="experts of each layer, two for each token: a Mixtral; 0 for none")
    add("--expert-parallel-size", type=int, default=1, help="replicas that share the experts of each layer")
    add("--context-parallel-size", type=int, default=1, help="ranks that share each sequence")
    add("--sequence-parallel", action="store_true", help="divide the activations between the layers too")
    add("--schedule", help="such as zb-h1, or a CSV file of actions; without it 1f1b, or interleaved")
    add("--virtual-pipeline-size", type=int, default=1, help="stages of each rank; 1 leaves it to the schedule")
    add("--zero1", action="store_true", help="divide the optimizer's state over the replicas")
    add("--shard", action="store_true", help="divide weights and gradients over the replicas too (FSDP)")
    add("--trace", help="file for a Chrome trace of each step, which https://ui.perfetto.dev opens")
    return parser.parse_args()


def read_texts(files: list[Path] | None) -> list[torch.Tensor]:
    """Return the bytes to train on and those held out, every twentieth file or the last; zeros end files."""
    named = files or sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [file.read_bytes() for file in named if file.stat().st_size]
    if len(texts) < 2:
        raise ValueError(f"--data needs two or more files with text, and has {len(texts)}: the last one is held out")
    every = min(20, len(texts))
    parts = [text for number, text in enumerate(texts, 1) if number % every], texts[every - 1 :: every]
    return [torch.frombuffer(bytearray(b"\0".join(part)), dtype=torch.uint8) for part in parts]


def sequences(text: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    """Return this replica's part of the sequences that begin at ``starts``, int64 of shape ``(B, length)``."""
    own = starts[parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_size()]
    return text[own[:, None] + torch.arange(length)].long()


def make_model(flags: Namespace) -> NxDPPModel[Literal[True]]:
    """Build the Llama or the Mixtral, of which each rank keeps its own layers, and its experts."""
    small = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4,
        max_position_embeddings=1024, bos_token_id=0, eos_token_id=0, initializer_range=0.04,  # 1/sqrt(hidden_size)
    )  # fmt: skip
    config: Any = LlamaConfig.from_json_file(flags.config) if flags.config else small
    kind = MixtralForCausalLM if flags.experts else LlamaForCausalLM
    if flags.experts:
        config = MixtralConfig(**config.to_dict() | {"model_type": "mixtral", "num_local_experts": flags.experts})
    torch.manual_seed(flags.seed)
    # nxdpp: no memory yet; the weights will be as kind(config) draws them.
    whole = nxdpp.deferred_init(kind, config)
    # nxdpp: each rank keeps its own layers, of each layer its experts and its part of the rest, and its tokens.
    whole = nxdpp.expert_parallelize(whole) if flags.experts else whole
    model = NxDPPModel(
        nxdpp.context_parallelize(nxdpp.tensor_parallelize(whole, sequence_parallel=flags.sequence_parallel)),
        num_microbatches=flags.num_microbatches, schedule=flags.schedule, trace_file_path=flags.trace,
        virtual_pipeline_size=flags.virtual_pipeline_size, use_zero1_optimizer=flags.zero1,
        broadcast_and_average_loss=True, loss_normalization="tokens",
    )  # fmt: skip
    if flags.shard:
        nxdpp.fully_shard(model)
    model.move_model_to_device()
    return model


def learning_rate_factor(step: int, steps: int) -> float:
    """Return the factor of step ``step``, from 0: it rises for a tenth of the steps, and falls on a cosine."""
    warm_up = max(1, steps // 10)
    progress = (step - warm_up) / max(1, steps - warm_up)
    return (step + 1) / warm_up if step < warm_up else 0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2


def held_out_loss(model: NxDPPModel[Literal[True]], text: torch.Tensor, flags: Namespace) -> float:
    """Return the mean loss of about 128 evenly spaced sequences."""
    count = max(1, 128 // flags.batch_size) * flags.batch_size
    starts = torch.linspace(0, len(text) - flags.seq_length, count, dtype=torch.float64).long()
    batches = [sequences(text, batch, flags.seq_length) for batch in starts.split(flags.batch_size)]
    model.eval()
    losses: list[float] = [model.run_eval(input_ids=ids, labels=ids).item() for ids in batches]
    model.train()
    return sum(losses) / len(losses)


def say(line: str) -> None:
    """Print ``line`` on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def print_sample(folder: Path, held_out: torch.Tensor) -> None:
    """Load the trained model with transformers, and let it continue the start of the held-out text."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)  # transformers types generate() for another class
    ids = held_out[None, :48].long()
    (ids,) = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=0.7, max_length=256)
    print(f"a sample from {folder}:", bytes(ids.tolist()).decode(errors="replace"), sep="\n")


def train(flags: Namespace) -> None:
    """Train, save, and print a sample; on all ranks."""
    (text, held_out), model, checkpoints = read_texts(flags.data), make_model(flags), flags.output / "checkpoints"
    weights, adamw = model.local_parameters(), {"lr": flags.learning_rate, "betas": (0.9, 0.99)}
    # nxdpp: of ZeRO-1 each replica keeps a part of AdamW's state, and the optimizer clips.
    divides = flags.zero1 and parallel_state.get_data_parallel_size() > 1
    optimizer = Zero1Optimizer(weights, torch.optim.AdamW, **adamw) if divides else torch.optim.AdamW(weights, **adamw)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, flags.steps))
    settings, losses = {name: str(getattr(flags, name)) for name in SAME}, []
    if nxdpp.has_checkpoint(checkpoints):
        # nxdpp: a checkpoint of any layout of ranks.
        content = nxdpp.load_checkpoint(checkpoints, None, model, optimizer, rates) if flags.resume else {}
        if content.get("settings") != settings:
            raise ValueError(f"{checkpoints} has a training: give --resume and the same {SAME}, or another --output")
        losses = content["losses"]
    print(f"rank {dist.get_rank()}: {', '.join(model.stage_layers)}", flush=True)
    say(f"held-out loss after step {len(losses)}: {held_out_loss(model, held_out, flags):.3f}")
    shape, generator = (flags.steps, flags.batch_size), torch.Generator().manual_seed(flags.seed)
    starts, began = torch.randint(len(text) - flags.seq_length + 1, shape, generator=generator), time.perf_counter()
    # nxdpp: a line for each step of each rank, which `python -m nxdpp watch` shows.
    with MetricsFile(flags.output, model, done=len(losses), steps=flags.steps) as metrics:
        for step in range(len(losses) + 1, flags.steps + 1):
            ids = sequences(text, starts[step - 1], flags.seq_length)
            # nxdpp: forward and backward of all microbatches; gradients are in .grad as usual.
            losses.append(model.run_train(input_ids=ids, labels=ids).item())
            if not divides:
                # nxdpp: the norm of the whole model; torch's clip_grad_norm_ would see this rank's part.
                model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            rates.step()
            metrics.write(losses[-1], flags.batch_size * flags.seq_length)
            if step % max(1, flags.steps // 20) == 0:
                say(f"step {step}/{flags.steps}  loss {losses[-1]:.3f}  {time.perf_counter() - began:.1f} s")
            if flags.checkpoint_every and (step % flags.checkpoint_every == 0 or step == flags.steps):
                # nxdpp: each rank writes its own part of weights and optimizer.
                content = {"settings": settings, "losses": losses}
                nxdpp.save_checkpoint(checkpoints, f"step_{step}", model, optimizer, rates, content, num_kept_ckpts=3)
        metrics.add(held_out_loss=(loss := held_out_loss(model, held_out, flags)))
    say(f"held-out loss after step {flags.steps}: {loss:.3f}")
    # nxdpp: a Hugging Face checkpoint; each rank writes its own layers.
    nxdpp.save_pretrained(model, flags.output)
    if dist.get_rank() == 0:
        lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, 1)]
        (flags.output / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        print_sample(flags.output, held_out)


def main() -> None:
    """Start the process groups, and train."""
    flags = read_flags()
    sharing = flags.tensor_parallel_size * max(flags.expert_parallel_size, flags.context_parallel_size)
    # nxdpp: the ranks of a pipeline, and those that share each layer; further processes are replicas.
    parallel_state.initialize_model_parallel(
        flags.tensor_parallel_size, flags.pipeline_parallel_size or int(os.environ.get("WORLD_SIZE", "1")) // sharing,
        context_parallel_size=flags.context_parallel_size, expert_model_parallel_size=flags.expert_parallel_size,
        device=flags.device,
    )  # fmt: skip
    train(flags)
    parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    main()
