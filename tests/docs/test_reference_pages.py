"""The code of the pages in docs/ beside the guide runs, or is marked as a fragment and compiled.

A page that leaves out a model, data or imports, as reference pages do, has them here, before its code.
"""

from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig

from tests.docs.pages import ROOT, Block, blocks, fragments
from tests.docs.torchrun import run_forked

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))

BEFORE = {
    "nnscaler.md": "",
    "oslo.md": """\
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam
from transformers import AutoModelForCausalLM

batch = {"input_ids": torch.arange(32).view(2, 16)}
""",
    "planner.md": """\
import nxdpp
import torch
from nxdpp import NxDPPModel
from transformers import AutoConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(AutoConfig.from_pretrained("."))
""",
    "tensor_models.md": """\
import torch
from nxdpp import check_tensor_parallel, parallel_state, tensor_parallelize
from transformers import LlamaConfig, LlamaForCausalLM

parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, backend="gloo")
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
small_config = LlamaConfig(vocab_size=64, **sizes)
model, ids = LlamaForCausalLM(small_config), torch.arange(16).view(1, 16)
plan = {"model.layers.*.mlp.gate_proj": "colwise", "model.layers.*.mlp.up_proj": "colwise"}
plan["model.layers.*.mlp.down_proj"] = "rowwise"
""",
}
"""What the code of a page leaves out."""


def _gpt2(folder: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(folder / "gpt2")


def _llama(folder: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    LlamaConfig(num_hidden_layers=4, vocab_size=64, **sizes).save_pretrained(folder)


FILES = {"oslo.md": _gpt2, "planner.md": _llama}
"""Files beside the code of a page, before it starts; ranks that write the same file read each other's half."""

AFTER = {
    "nnscaler.md": "before, after = model.infer_step([sample(4 * unit)] * 4)[0], losses[0]\nassert before < after",
    "oslo.md": "assert all(each.grad is not None for each in model.parameters())",
    "planner.md": "assert isinstance(model, NxDPPModel)",
    "tensor_models.md": "assert model.model.layers[0].mlp.up_proj.weight.shape == (64, 64)",
}
"""What the code of a page has done."""

HERE = {
    "planner.md": {"devices=64, hosts=8": "devices=2, hosts=1", "batch=1024, seq_length=8192": "batch=8, seq_length=16"}
}
"""Sizes of a cluster, and those of this machine."""

RANKS = {"nnscaler.md": 4}
ELSEWHERE = {"checkpoints.md"}
"""Its program is run by ``test_resuming.py``."""


def _whole(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python" and block.comment != "fragment"]


def test_each_page_with_code_is_run() -> None:
    assert {page.name for page in PAGES if _whole(page)} == {*BEFORE, *ELSEWHERE}
    assert AFTER.keys() == BEFORE.keys()


@pytest.mark.parametrize("name", BEFORE)
def test_the_code_of_a_page_runs(name: str, tmp_path: Path) -> None:
    code = "\n".join(block.text for block in _whole(DOCS / name))
    for cluster, here in HERE.get(name, {}).items():
        assert code.count(cluster) == 1
        code = code.replace(cluster, here)
    file = tmp_path / "empty" / "train.py"
    file.parent.mkdir()
    if name in FILES:
        FILES[name](file.parent)
    file.write_text(f"{BEFORE[name]}\n{code}\n{AFTER[name]}\n", encoding="utf-8")
    ended = run_forked(file, RANKS.get(name, 2))
    assert ended.status == 0, ended.account


@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in PAGES if fragments(page)])
def test_fragments_compile(page: Path) -> None:
    for block in fragments(page):
        compile("\n" * (block.line - 1) + block.text, str(page), "exec")
