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

from tests.support.run_ranks import run_ranks, want

EXAMPLE = Path(__file__).parents[2] / "examples/fine_tune.py"
PROMPT = "a cat"
TEMPLATE_OF_PROMPT = "user: a cat</s>"
TEMPLATE = "{% for each in messages %}{{ each['role'] }}: {{ each['content'] }}{{ eos_token }}{% endfor %}"


def publish(folder: Path) -> None:
    """Save a tiny model with its tokenizer, and a chat file."""
    want("nxdpp.doors.trl.sft")
    letters = ["<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytewise = Tokenizer(models.BPE({each: number for number, each in enumerate(letters)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, pad_token="<pad>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(letters), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    config.eos_token_id, config.pad_token_id = 1, 0
    LlamaForCausalLM(config).save_pretrained(folder)
    turns = [[("user", f"a cat {number}"), ("assistant", "sat on a mat")] for number in range(20)]
    chats = [{"messages": [{"role": role, "content": text} for role, text in each]} for each in turns]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    (folder / "lines.txt").write_text("\n".join(f"a cat {number} sat on a mat" for number in range(20)))


def tune(rank: int, folder: Path, data: str, *flags: str) -> tuple[str, list[Any]]:
    uploads: list[Any] = []
    vars(huggingface_hub)["HfApi"] = lambda: SimpleNamespace(
        create_repo=lambda *_, **given: uploads.append(given), upload_folder=lambda **given: uploads.append(given)
    )
    sys.argv = ["fine_tune.py", str(folder), str(folder / data), str(folder / f"of {data}"), "--cpu", *flags]
    printed = io.StringIO()
    with redirect_stdout(printed):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return printed.getvalue().rstrip().rpartition("\n")[2], uploads


def tune_twice(rank: int, folder: Path) -> list[tuple[str, list[Any]]]:
    return [
        tune(rank, folder, "chats.jsonl", "--steps", "4"),
        tune(rank, folder, "chats.jsonl", "--steps", "8", "--resume", "--prompt", PROMPT, "--push", "me/tuned"),
    ]


def tune_adapters(rank: int, folder: Path) -> None:
    tune(rank, folder, "lines.txt", "--steps", "2", "--four-bit")


def test_the_example_is_one_page() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60


@pytest.mark.cpu_only("accelerate wants the device of LOCAL_RANK, and a rank has one")
def test_a_model_is_tuned_resumed_and_generates(tmp_path: Path) -> None:
    publish(tmp_path)
    tuned = tmp_path / "of chats.jsonl"

    (_, (answer, uploads)), (_, (_, of_others)) = run_ranks(2, tune_twice, tmp_path)

    assert uploads[0] == {"private": True, "exist_ok": True}
    assert uploads[1]["repo_id"] == "me/tuned"
    assert uploads[1]["ignore_patterns"] == ["*/*", "*.bin"]
    assert of_others == []
    state = json.loads((tuned / "checkpoint-8/trainer_state.json").read_text())
    assert state["global_step"] == 8
    evaluated = {each["step"]: each["eval_loss"] for each in state["log_history"] if "eval_loss" in each}
    assert {1, 4, 8} <= evaluated.keys()
    assert evaluated[8] < evaluated[1]
    assert "library_name: transformers" in (tuned / "README.md").read_text()
    whole = LlamaForCausalLM.from_pretrained(tuned).eval()
    tokenizer = AutoTokenizer.from_pretrained(tuned)
    asked = TEMPLATE_OF_PROMPT
    tokens = whole.generate(**tokenizer(asked, return_tensors="pt"), max_new_tokens=40)
    text: Any = tokenizer.decode(tokens[0], skip_special_tokens=True)
    assert answer == text.rpartition("\n")[2]


@pytest.mark.cpu_only("accelerate wants the device of LOCAL_RANK, and a rank has one")
def test_adapters_are_tuned_on_lines_over_four_bit_weights(tmp_path: Path) -> None:
    publish(tmp_path)
    run_ranks(2, tune_adapters, tmp_path)
    state = json.loads((tmp_path / "of lines.txt/checkpoint-2/trainer_state.json").read_text())
    assert [each["step"] for each in state["log_history"] if "eval_loss" in each] == [1, 2]
    assert (tmp_path / "of lines.txt/adapter_model.safetensors").exists()
    assert not (tmp_path / "of lines.txt/model.safetensors").exists()
