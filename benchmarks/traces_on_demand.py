"""One process that wraps and traces a Llama for each line of its standard input, and prints processor seconds.

``trace_speed.py`` starts it with the nxdpp of either tree. It uses only names that both trees have.
"""

import gc
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp import NxDPPModel, parallel_state

_RANKS = 8


def seconds_of_a_trace(config: LlamaConfig) -> tuple[float, float, float]:
    """Processor seconds of wrapping a Llama, of the trace of its first step, and of building this rank's stages."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    wrap, wrapped = _timed(lambda: NxDPPModel(model, num_microbatches=_RANKS))
    programs = wrapped.steps.programs
    ids = torch.zeros(1, 16, dtype=torch.long)
    trace, cut = _timed(lambda: programs.cut_graph({"input_ids": ids, "labels": ids}, True))
    build, _ = _timed(lambda: programs.program(cut, "loss"))
    return wrap, trace, build


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    began = time.process_time()
    result = run()
    return time.process_time() - began, result


def main(sizes: dict[str, int]) -> None:
    """Wrap and trace as the last of the ranks, until the input ends."""
    config = LlamaConfig(**sizes)
    parallel_state.initialize_debug(pipeline_model_parallel_rank=_RANKS - 1, pipeline_model_parallel_size=_RANKS)
    seconds_of_a_trace(config)
    print("ready", flush=True)
    for _ in sys.stdin:
        print(*seconds_of_a_trace(config), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
