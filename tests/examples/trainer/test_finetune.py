"""The example trains over two stages, prints each loss once, and samples from the model that it saved."""

import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.support.run_program import run_program

ROOT = Path(__file__).parents[3]
FLAGS = (
    "--max_steps 4 --sequence_length 32 --logging_steps 1 --eval_steps 2 --save_steps 2 --gradient_accumulation_steps 2"
)


def test_it_trains_saves_and_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    script = str(ROOT / "examples/trainer/finetune.py")
    flags = [*FLAGS.split(), "--text", "LICENSE", "--output_dir", str(tmp_path)]
    ended = run_program(script, flags, ranks=2)
    assert ended.codes == [0, 0], ended.output
    losses = [float(loss) for loss in re.findall(r"\{'loss': '([\d.]+)'", ended.output)]
    assert len(losses) == 4, ended.output
    assert losses[0] == pytest.approx(5.6, abs=0.4)
    assert losses[-1] < losses[0]
    assert ended.output.count("'eval_loss'") == 2
    assert "\ndef " in ended.output
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.num_hidden_layers == 8
    resumed = run_program(script, [*flags, "--resume_from_checkpoint", f"{tmp_path}/checkpoint-2"], ranks=2)
    assert resumed.codes == [0, 0], resumed.output
    assert [float(loss) for loss in re.findall(r"\{'loss': '([\d.]+)'", resumed.output)] == losses[2:]
