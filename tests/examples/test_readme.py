"""The README's training loop, run before and after the change that it shows."""

import re
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.examples.tiny import TINY_LLAMA
from tests.support.run_ranks import run_ranks

README = Path(__file__).parents[2] / "README.md"


def _loop(side: str) -> str:
    """The README's loop before (``-``) or after (``+``) the diff."""
    (difference,) = re.findall(r"^```diff\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    return "\n".join(line[1:] for line in difference.splitlines() if line[:1] in ("", " ", side))


def _train(rank: int, side: str) -> dict[str, torch.Tensor]:
    """This rank's weights after the loop over two batches."""
    batches = torch.randint(256, (2, 8, 16), generator=torch.Generator().manual_seed(1))
    names = {
        "LlamaForCausalLM": LlamaForCausalLM,
        "config": LlamaConfig(**{**TINY_LLAMA, "num_hidden_layers": 4}),
        "batches": batches,
    }
    exec(_loop(side), names)
    model = names["model"]
    assert isinstance(model, torch.nn.Module)
    return dict(model.state_dict())


def test_the_changed_lines_make_a_pipeline_that_trains() -> None:
    before = _train(0, "-")
    ranks = run_ranks(4, _train, "+")

    assert [len(weights) > 0 for weights in ranks] == [True] * 4
    whole = {name: weight for weights in ranks for name, weight in weights.items()}
    assert sum(map(len, ranks)) == len(whole)
    torch.testing.assert_close(whole, before, rtol=1e-4, atol=1e-5)
