"""Measured steps of the unwrapped model on one process, for comparison with the pipeline."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from settings import Settings
from transformers import LlamaForCausalLM
from windows import RandomWindows

# The first step makes memory and the optimizer's state.
STEPS = 5


@dataclass(frozen=True)
class OneProcess:
    """Median seconds of a step on one process, ``None`` if the model does not fit, and words on how it ran."""

    step: float | None
    said: str


def measure_one_process(settings: Settings, device: torch.device, microbatches: int) -> OneProcess:
    """Measure steps of the unwrapped model on ``device``, with the whole batch in this many microbatches.

    On the CPU it runs with the threads of this process, then with the threads of all processes of this host, at most
    one for each core. The faster run counts: small operations gain nothing from more threads.
    """
    said = f"{microbatches} microbatches"
    own = torch.get_num_threads()
    try:
        step = _training_step(settings, device, microbatches)
        if device.type != "cpu":
            return OneProcess(_median_seconds(step), said)
        together = min(own * int(os.environ.get("LOCAL_WORLD_SIZE", "1")), _cores())
        seconds = {}
        for threads in sorted({own, together}):
            torch.set_num_threads(threads)
            seconds[threads] = _median_seconds(step)
    except torch.OutOfMemoryError:
        return OneProcess(None, f"the whole model does not fit into the memory of {device}")
    finally:
        torch.set_num_threads(own)
    best = min(seconds, key=seconds.__getitem__)
    return OneProcess(seconds[best], f"{said} on {best} thread(s)")


def _median_seconds(step: Callable[[int], None]) -> float:
    seconds = []
    for number in range(STEPS):
        began = time.perf_counter()
        step(number)
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])


def _cores() -> int:
    """Cores that this process may use; macOS has no affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _training_step(settings: Settings, device: torch.device, microbatches: int) -> Callable[[int], None]:
    """The step that ``run_train``, clipping and AdamW make together, without nxdpp."""
    torch.manual_seed(settings.seed)
    with device:
        model = LlamaForCausalLM(settings.config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.99))
    windows = RandomWindows(settings.corpus.train, STEPS * settings.batch_size, settings.seq_length, settings.seed)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=settings.dtype == "bfloat16")

    def step(number: int) -> None:
        first = number * settings.batch_size
        batch = torch.stack([windows[first + row] for row in range(settings.batch_size)]).to(device)
        losses = []
        for ids in batch.chunk(microbatches):
            with autocast:
                # As in the pipeline: a cache for generation copies the keys and values of each layer.
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss / microbatches
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        # Waits for the device, as the training does for each loss.
        torch.stack(losses).sum().item()

    return step
