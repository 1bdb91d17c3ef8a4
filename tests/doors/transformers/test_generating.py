"""Evaluations by generated tokens are those of ``Seq2SeqTrainer`` in one process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from nxdpp.integrations import PipelineTrainer
from tests.doors.transformers.trainings import Rows, padded, take_device_of_ranks
from tests.generation.generated_models import MODELS
from tests.support.run_ranks import run_ranks

_TEXT = np.array([chr(ord("A") + number % 26) for number in range(64)])


def _same_letters(prediction: Any) -> dict[str, float]:
    """A metric of texts: the share of letters at the place where the labels have them, and of words that begin so."""
    words, labels = (
        ["".join(_TEXT[row[row >= 0]]) for row in rows] for rows in (prediction.predictions, prediction.label_ids)
    )
    pairs = list(zip(words, labels, strict=True))
    same = sum(ours == theirs for word, label in pairs for ours, theirs in zip(word, label, strict=False))
    return {"letters": same / sum(map(len, labels)), "begins": sum(word[:1] == label[:1] for word, label in pairs)}


def _trained(cls: Any, folder: Path) -> list[dict[str, float]]:
    take_device_of_ranks()
    model = MODELS["t5"]()
    args = Seq2SeqTrainingArguments(
        str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        eval_strategy="steps",
        eval_steps=1,
        max_steps=1,
        logging_steps=1,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=2,
        predict_with_generate=True,
        generation_max_length=8,
    )
    trainer = cls(
        model=model,
        args=args,
        data_collator=padded,
        train_dataset=Rows(16, 5, 9),
        eval_dataset=Rows(3, 5, 9, seed=1),
        compute_metrics=_same_letters,
    )
    trainer.train()
    metrics = trainer.evaluate(max_new_tokens=4, num_beams=2)
    return [*trainer.state.log_history, metrics]


def on_rank(rank: int, folder: Path) -> Any:
    return _trained(PipelineTrainer, folder)


def test_metrics_of_generated_tokens_equal_one_process(tmp_path: Path) -> None:
    expected = _trained(Seq2SeqTrainer, tmp_path / "one")
    for rank in run_ranks(2, on_rank, tmp_path):
        for ours, theirs in zip(rank, expected, strict=True):
            names = {name for name in theirs if name.startswith("eval_") and "per_second" not in name} | {"loss"}
            for name in names - {"eval_runtime"} & theirs.keys():
                assert ours[name] == pytest.approx(theirs[name], abs=1e-6), (name, ours, theirs)
    assert any(each.get("eval_letters") for each in expected)
