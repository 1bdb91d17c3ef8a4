"""Memory of a rank that trains adapters over weights in float32, and over 4-bit weights of bitsandbytes.

    python benchmarks/four_bit.py [--hidden 1024] [--layers 16]

Two ranks train a Llama with random weights over gloo. ``weights`` are the bytes of a rank's parameters, ``peak`` the
most resident memory of its process, with the load of the whole model.
"""

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

import torch  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM  # noqa: E402

from benchmarks.report import markdown_table  # noqa: E402
from nxdpp import NxDPPModel, parallel_state  # noqa: E402
from nxdpp.devices.memory import peak_bytes  # noqa: E402
from tests.support.run_ranks import run_ranks  # noqa: E402

RANKS, ROWS, LENGTH = 2, 8, 128


def main() -> None:
    """Print a table in Markdown; a failed rank raises with the output of every rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024, help="width of the Llama")
    parser.add_argument("--layers", type=int, default=16)
    asked = parser.parse_args()
    config = LlamaConfig(
        vocab_size=2000,
        hidden_size=asked.hidden,
        intermediate_size=asked.hidden * 11 // 4,
        num_hidden_layers=asked.layers,
        num_attention_heads=16,
    )
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        rows = []
        for bits in (32, 4):
            for rank, figures in enumerate(run_ranks(RANKS, _train, folder, bits, timeout=600.0)):
                rows.append([f"{bits} bits", str(rank), *(f"{each / 1e6:,.0f}" for each in figures)])
    print(markdown_table(["form", "rank", "weights, MB", "peak, MB"], rows, left=["form"]))


def _train(rank: int, folder: str, bits: int) -> tuple[int, int]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=RANKS)
    form = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)} if bits == 4 else {}
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **form).train()
    model = NxDPPModel(get_peft_model(whole, LoraConfig(target_modules="all-linear")), num_microbatches=ROWS)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 2000
    for _ in range(2):
        model.run_train(input_ids=ids, labels=ids)
        optimizer.step()
        optimizer.zero_grad()
    return sum(each.nbytes for each in model.local_parameters()), peak_bytes(torch.device("cpu"))


if __name__ == "__main__":
    main()
