"""Checkpoints of ``PipelineTrainer``: resumed trainings, the best model, and directories that transformers loads."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    EarlyStoppingCallback,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
)
from transformers.trainer_utils import PredictionOutput

from nxdpp import parallel_state
from nxdpp.integrations import PipelineTrainer
from tests.doors.transformers.test_trainer import TIMES, Logs, assert_alike
from tests.doors.transformers.trainings import Rows, Training, padded
from tests.support.models import gpt2, llama
from tests.support.run_ranks import run_ranks

SAVED = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{number}": number for number in range(61)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), unk_token="w0")


def saved(callbacks: list[TrainerCallback] | None = None, **args: Any) -> Training:
    given = {"processing_class": tokenizer(), "data_collator": padded, "eval_dataset": Rows(7), "callbacks": callbacks}
    return Training({**SAVED, **args}, model=llama, given=given)


def with_dropout(**args: Any) -> Training:
    """Its sampler draws the order of an epoch from torch's global generator, as dropout does."""
    given = {"data_collator": padded, "eval_dataset": Rows(7)}
    order = {"accelerator_config": {"use_seedable_sampler": False}}
    return Training({**SAVED, **order, **args}, model=lambda: gpt2(2, dropout=0.1), given=given)


class Saved(NamedTuple):
    """Results of one rank: logs by training, the weights of a best model, and predictions."""

    logs: dict[str, Logs]
    best: dict[str, torch.Tensor]
    best_checkpoint: str | None
    predicted: PredictionOutput


def train_and_resume(rank: int, folder: Path) -> Saved:
    logs: dict[str, Logs] = {}

    def trained(name: str, training: Training, checkpoint: str | None = None) -> Any:
        trainer = training.trainer(PipelineTrainer, folder / name)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(folder / checkpoint))
        logs[name] = trainer.state.log_history
        return trainer

    # The worst evaluation is the first one.
    worst = {"load_best_model_at_end": True, "greater_is_better": True, "metric_for_best_model": "loss"}
    best = trained("best", saved(**worst, save_total_limit=2, callbacks=[EarlyStoppingCallback(1)]))
    weights = {name: each.detach().clone() for name, each in best.pipelined.local_named_parameters()}
    whole = trained("whole", saved())
    whole.save_model(str(folder / "model"))
    predicted = whole.predict(Rows(7, seed=1))
    trained("in an epoch", saved(), "whole/checkpoint-2")
    trained("weights alone", saved(save_only_model=True, max_steps=2))
    trained("dropout", with_dropout())
    # Inside of the second epoch.
    trained("dropout again", with_dropout(), "dropout/checkpoint-4")
    with pytest.raises(ValueError, match=r"is a checkpoint of Trainer itself.* Start .* its weights: from_pretrained"):
        trained("refused", saved(), "plain/checkpoint-2")
    return Saved(logs, weights, best.state.best_model_checkpoint, predicted)


def resume(rank: int, folder: Path) -> tuple[Logs, dict[str, Logs], dict[str, torch.Tensor]]:
    """Return the logs of four stages, the logs of shards over two replicas, and the whole weights of their best."""
    trainer = saved().trainer(PipelineTrainer, folder / "in four stages", pipeline_parallel_size=4)
    # The newest checkpoint of the directory.
    trainer.train(resume_from_checkpoint=True)
    parallel_state.destroy_model_parallel()
    logs = {}
    for name, checkpoint in (("shards", None), ("shards again", "shards/checkpoint-2")):
        best: dict[str, Any] = {
            "load_best_model_at_end": True,
            "greater_is_better": True,
            "metric_for_best_model": "loss",
        }
        sharded: Any = saved(**best, fsdp=True).trainer(PipelineTrainer, folder / name, 2, pipeline_parallel_size=2)
        sharded.train(resume_from_checkpoint=checkpoint and str(folder / checkpoint))
        logs[name] = sharded.state.log_history
    shards = dict(sharded.pipelined.local_named_parameters())
    return trainer.state.log_history, logs, {name: each.detach().full_tensor() for name, each in shards.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saves")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Trainer:
    trainer = saved().trainer(Trainer, folder / "plain")
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def ranks(folder: Path, plain: Trainer) -> list[Saved]:
    return run_ranks(2, train_and_resume, folder)


def test_a_resumed_training_goes_on_to_the_bit(ranks: list[Saved], plain: Trainer) -> None:
    for rank in ranks:
        assert_alike(rank.logs["whole"], plain.state.log_history)
        assert _values(rank.logs["in an epoch"]) == _values(rank.logs["whole"])
        assert _values(rank.logs["dropout again"]) == _values(rank.logs["dropout"])


@pytest.fixture(scope="module")
def four_ranks(ranks: list[Saved], folder: Path) -> list[Any]:
    shutil.copytree(folder / "whole" / "checkpoint-2", folder / "in four stages" / "checkpoint-2")
    return run_ranks(4, resume, folder)


def test_another_layout_resumes(ranks: list[Saved], four_ranks: list[Any]) -> None:
    for logs, _, _ in four_ranks:
        for own, other in zip(_values(logs), _values(ranks[0].logs["whole"]), strict=True):
            assert own == pytest.approx(other, abs=1e-6, rel=0)


def test_shards_resume_to_the_bit_and_load_the_best_model(four_ranks: list[Any], folder: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(folder / "shards" / "checkpoint-2").state_dict()
    for _, logs, best in four_ranks:
        assert _values(logs["shards again"]) == _values(logs["shards"])
        assert all(torch.equal(weight, expected[name]) for name, weight in best.items())


def test_training_stops_early_with_the_best_model(ranks: list[Saved], folder: Path) -> None:
    first = folder / "best" / "checkpoint-2"
    expected = AutoModelForCausalLM.from_pretrained(first).state_dict()
    for rank in ranks:
        assert rank.best_checkpoint == str(first)
        assert max(each["step"] for each in rank.logs["best"]) == 4
        for name, weight in rank.best.items():
            assert torch.equal(weight, expected[name])
    assert sorted(path.name for path in (folder / "best").iterdir()) == ["checkpoint-2", "checkpoint-4"]


def test_transformers_loads_a_saved_model(ranks: list[Saved], plain: Trainer, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert plain.model is not None
    for name, weight in plain.model.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight, atol=1e-6, rtol=0)
    assert AutoTokenizer.from_pretrained(folder / "model").get_vocab() == tokenizer().get_vocab()
    expected = plain.predict(Rows(7, seed=1))
    for rank in ranks:
        np.testing.assert_array_equal(np.asarray(rank.predicted.label_ids), np.asarray(expected.label_ids))
        assert rank.predicted.predictions == pytest.approx(expected.predictions, abs=1e-5)
        metrics = expected.metrics or {}
        assert (rank.predicted.metrics or {})["test_loss"] == pytest.approx(metrics["test_loss"], abs=1e-6)


def test_weights_alone_are_saved_without_a_state(ranks: list[Saved], folder: Path) -> None:
    names = {path.name for path in (folder / "weights alone" / "checkpoint-2").iterdir()}
    assert "model.safetensors.index.json" in names
    assert not names & {"pipeline_state", "rng_state_0.pth"}


def _values(logs: Logs) -> Logs:
    """Steps, losses, norms and learning rates of the logged steps and evaluations."""
    return [
        {key: value for key, value in each.items() if not any(time in key for time in TIMES)}
        for each in logs
        if "train_loss" not in each
    ]
