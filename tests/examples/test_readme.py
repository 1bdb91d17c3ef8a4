"""The README's training loop before and after the change that it shows, and the guide's in three dimensions."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.examples.tiny import TINY_LLAMA
from tests.support.run_ranks import run_ranks

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DIVIDED = ROOT / "docs/guide/tensor_and_data.md"


def _loop(side: str) -> str:
    """The README's loop before (``-``) or after (``+``) the diff."""
    (difference,) = re.findall(r"^```diff\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    return "\n".join(line[1:] for line in difference.splitlines() if line[:1] in ("", " ", side))


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


def test_the_changed_lines_make_a_pipeline_that_trains_and_logs_once() -> None:
    before, lines = _train(0, _loop("-"))
    ranks = run_ranks(4, _train, _loop("+"))

    assert [len(weights) > 0 for weights, _ in ranks] == [True] * 4
    whole = {name: weight for weights, _ in ranks for name, weight in weights.items()}
    assert sum(len(weights) for weights, _ in ranks) == len(whole)
    torch.testing.assert_close(whole, before, rtol=1e-4, atol=1e-5)
    assert re.fullmatch(r"step 0: loss 5\.\d{4}", lines[0])
    assert [printed for _, printed in ranks] == [lines, [], [], []]


def test_the_lines_with_tensor_ranks_replicas_and_zero1_train_as_one_process() -> None:
    before, _ = _train(0, _loop("-"))
    first, second, *replica = (weights for weights, _ in run_ranks(4, _train, _divided_loop()))

    for name, whole in before.items():
        parts = [first[name], second[name]]
        if parts[0].shape == whole.shape:
            joined = parts[0]
        else:
            joined = torch.cat(parts, dim=next(d for d in range(whole.dim()) if parts[0].size(d) != whole.size(d)))
        torch.testing.assert_close(joined, whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(replica, [first, second], rtol=0, atol=0)
