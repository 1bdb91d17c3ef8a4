"""One rank that starts, runs a first step, and prints the wall seconds of each phase as JSON.

``first_step.py`` starts it. With ``torchrun`` the sizes are the main job's. As one process it is a rank of 64 in the
debug mode, with the shapes of Llama-3.1-405B. That rank has no weights and runs no step: they take more than a host.
"""

import json
import os
import sys
import time
from pathlib import Path

BEGUN = float(sys.argv[2])
_seconds: dict[str, float] = {}
_last = BEGUN


def _ended(phase: str) -> None:
    """Note the end of ``phase``, and the start of the next one."""
    global _last
    now = time.time()
    _seconds[phase], _last = now - _last, now


_ended("launcher and Python")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

_ended("imports of torch and transformers")
from nxdpp import NxDPPModel, deferred_init, parallel_state  # noqa: E402

_ended("import of nxdpp")

MAIN_JOB = {
    "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
}  # fmt: skip
BATCH, LENGTH, MICROBATCHES = 8, 128, 8
SIMULATED_RANKS, SIMULATED_RANK = 64, 31


def main_job() -> None:
    """Start as a rank of ``torchrun``, and train one step; collective."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=int(os.environ["WORLD_SIZE"]))
    _ended("groups")
    torch.manual_seed(0)
    module = deferred_init(LlamaForCausalLM, LlamaConfig(**MAIN_JOB))
    _ended("model")
    model = NxDPPModel(module, num_microbatches=MICROBATCHES)
    model.move_model_to_device()
    _ended("wrap and weights")
    ids = torch.randint(MAIN_JOB["vocab_size"], (BATCH, LENGTH))
    model.trace(input_ids=ids, labels=ids)
    _ended("trace")
    model.run_train(input_ids=ids, labels=ids)
    dist.barrier()
    _ended("first step")


def simulated() -> None:
    """Start as one rank of 64 of Llama-3.1-405B, as far as its stages."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tests.support.llama_405b import llama_3_1_405b

    parallel_state.initialize_debug(
        pipeline_model_parallel_rank=SIMULATED_RANK, pipeline_model_parallel_size=SIMULATED_RANKS
    )
    _ended("groups")
    with torch.device("meta"):
        module = LlamaForCausalLM(llama_3_1_405b())
    _ended("model")
    model = NxDPPModel(module, num_microbatches=SIMULATED_RANKS)
    _ended("wrap and weights")
    ids = torch.zeros(SIMULATED_RANKS, 8192, dtype=torch.long, device="meta")
    model.trace(input_ids=ids, labels=ids)
    _ended("trace")


if __name__ == "__main__":
    simulated() if sys.argv[1] == "405B" else main_job()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps(_seconds), flush=True)
    parallel_state.destroy_model_parallel()
