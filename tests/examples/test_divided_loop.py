"""The guide's training loop in three dimensions."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.examples.tiny import TINY_LLAMA
from tests.support.run_ranks import run_ranks

ROOT = Path(__file__).parents[2]
DIVIDED = ROOT / "docs/guide/tensor_and_data.md"
WHOLE = """
torch.manual_seed(0)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=100)
for ids in batches:
    model(input_ids=ids, labels=ids).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
"""


def _divided_loop() -> str:
    """The guide's loop with tensor-parallel ranks and replicas, without stages: 4 processes instead of 8."""
    (loop,) = re.findall(
        r"^```python\n(from [^`]*tensor_parallelize.*?)^```", DIVIDED.read_text(), re.MULTILINE | re.DOTALL
    )
    assert isinstance(loop, str)
    return loop.replace("pipeline_model_parallel_size=2", "pipeline_model_parallel_size=1")


def _train(rank: int, loop: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """This rank's weights after the loop over two batches, and the lines that it prints."""
    batches = torch.randint(256, (2, 8, 16), generator=torch.Generator().manual_seed(1))
    names = {
        "torch": torch,
        "LlamaForCausalLM": LlamaForCausalLM,
        "config": LlamaConfig(**{**TINY_LLAMA, "num_hidden_layers": 4}),
        "batches": batches,
    }
    with redirect_stdout(StringIO()) as printed:
        exec(loop, names)
    model = names["model"]
    assert isinstance(model, torch.nn.Module)
    return dict(model.state_dict()), printed.getvalue().splitlines()


def test_the_lines_with_tensor_ranks_replicas_and_zero1_train_as_one_process() -> None:
    before, _ = _train(0, WHOLE)
    first, second, *replica = (weights for weights, _ in run_ranks(4, _train, _divided_loop()))

    for name, whole in before.items():
        parts = [first[name], second[name]]
        if parts[0].shape == whole.shape:
            joined = parts[0]
        else:
            joined = torch.cat(parts, dim=next(d for d in range(whole.dim()) if parts[0].size(d) != whole.size(d)))
        torch.testing.assert_close(joined, whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(replica, [first, second], rtol=0, atol=0)
