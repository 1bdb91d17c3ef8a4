"""Files of this project that execute in one steady training step, on each of two ranks.

    torchrun --nproc-per-node 2 benchmarks/files_of_a_step.py

A steady step is a ``run_train`` of a known signature. Prints the number of files of each rank, and rank 0's files.
"""

import sys
from pathlib import Path
from types import FrameType

sys.path.append(str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import nxdpp
from nxdpp import NxDPPModel, parallel_state

ROOT = Path(nxdpp.__file__).resolve().parent.parent


def main() -> None:
    """Run two steps, and note the files of the third."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=4)
    wrapped = NxDPPModel(LlamaForCausalLM(config), num_microbatches=4)
    ids = torch.randint(0, 100, (8, 16))
    batch = {"input_ids": ids, "labels": ids}
    for _ in range(2):
        wrapped.run_train(**batch)
    seen: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.add(frame.f_code.co_filename)

    sys.setprofile(note)
    wrapped.run_train(**batch)
    sys.setprofile(None)
    # Generated code has no file.
    paths = [Path(file).resolve() for file in seen if Path(file).is_file()]
    own = sorted(str(path.relative_to(ROOT)) for path in paths if ROOT in path.parents and path != Path(__file__))
    counts: list[int] = [0, 0]
    dist.all_gather_object(counts, len(own))
    if dist.get_rank() == 0:
        print(f"files of a steady step: {counts[0]} on rank 0, {counts[1]} on rank 1")
        print("\n".join(f"  {file}" for file in own))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
