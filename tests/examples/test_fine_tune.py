"""The example that tunes a published model: it trains, evaluates, saves, resumes, and generates as one process does."""

import io
import json
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.support.run_ranks import run_ranks

pytestmark = pytest.mark.one_python

EXAMPLE = Path(__file__).parents[2] / "examples/fine_tune.py"
PROMPT = "user: a cat"
TEMPLATE = "{% for each in messages %}{{ each['role'] }}: {{ each['content'] }}{{ eos_token }}{% endfor %}"


def publish(folder: Path) -> None:
    """Save a tiny model with its tokenizer, and a chat file."""
    letters = ["<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytewise = Tokenizer(models.BPE({each: number for number, each in enumerate(letters)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    bytewise.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, pad_token="<pad>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(letters), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    config.eos_token_id, config.pad_token_id = 1, 0
    LlamaForCausalLM(config).save_pretrained(folder)
    turns = [[("user", f"a cat {number}"), ("assistant", "sat on a mat")] for number in range(20)]
    chats = [{"messages": [{"role": role, "content": text} for role, text in each]} for each in turns]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))


def tune(rank: int, folder: Path, steps: int, *flags: str) -> tuple[str, list[Any]]:
    uploads: list[Any] = []
    vars(huggingface_hub)["HfApi"] = lambda: SimpleNamespace(
        create_repo=lambda *_, **__: None, upload_folder=lambda **given: uploads.append(given)
    )
    given = [str(folder), str(folder / "chats.jsonl"), "--output", str(folder / "tuned"), "--steps", str(steps)]
    sys.argv = ["fine_tune.py", *given, "--cpu", "--prompt", PROMPT, *flags]
    printed = io.StringIO()
    with redirect_stdout(printed):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return printed.getvalue().rstrip().rpartition("\n")[2], uploads


def test_a_model_is_tuned_resumed_and_generates(tmp_path: Path) -> None:
    publish(tmp_path)
    tuned = tmp_path / "tuned"
    run_ranks(2, tune, tmp_path, 4)
    first = (tuned / "checkpoint-4/trainer_state.json").read_text()

    (answer, uploads), (_, of_others) = run_ranks(2, tune, tmp_path, 8, "--push", "me/tuned")
    assert [each["repo_id"] for each in uploads] == ["me/tuned"]
    assert of_others == []

    state = json.loads((tuned / "checkpoint-8/trainer_state.json").read_text())
    assert state["global_step"] == 8
    evaluated = [each["eval_loss"] for each in state["log_history"] if "eval_loss" in each]
    assert evaluated[:4] == [each["eval_loss"] for each in json.loads(first)["log_history"] if "eval_loss" in each]
    assert evaluated[-1] < evaluated[0]
    assert "library_name: transformers" in (tuned / "README.md").read_text()
    whole = LlamaForCausalLM.from_pretrained(tuned).eval()
    tokenizer = AutoTokenizer.from_pretrained(tuned)
    tokens = whole.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=40)
    assert answer == tokenizer.decode(tokens[0], skip_special_tokens=True).rpartition("\n")[2]
