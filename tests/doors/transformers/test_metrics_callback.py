"""The metrics of a ``PipelineTrainer``: each optimizer step with what ``Trainer`` logs for it."""

from pathlib import Path
from typing import Any

from nxdpp.integrations import MetricsCallback, PipelineTrainer
from nxdpp.watching.metrics_reader import RunMetrics
from tests.doors.transformers.trainings import Rows, Training
from tests.support.run_ranks import run_ranks

ARGUMENTS = {
    "include_num_input_tokens_seen": "all",
    "save_strategy": "steps",
    "save_steps": 2,
    "logging_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "max_steps": 4,
}


def train(rank: int, folder: Path) -> list[dict[str, Any]]:
    """Train four steps, and again the last two of them; evaluate once more."""
    logs = []
    for checkpoint in (None, str(folder / "checkpoint-2")):
        training = Training(ARGUMENTS, given={"eval_dataset": Rows(7, seed=1)})
        trainer: Any = training.trainer(PipelineTrainer, folder)
        trainer.add_callback(MetricsCallback(trainer, actions_every=2))
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.evaluate(Rows(5, seed=2), metric_key_prefix="other")
        logs = trainer.state.log_history
    return logs


def test_steps_have_their_logs_and_a_resumed_training_appends(tmp_path: Path) -> None:
    logs, *_ = run_ranks(2, train, tmp_path)
    run = RunMetrics(tmp_path)
    curves = run.curves()
    expected = {
        name: [(log["step"], log[name]) for log in logs if name in log] for name in ("loss", "eval_loss", "other_loss")
    }
    assert {name: curves[name] for name in expected} == expected
    assert [step for step, _ in expected["loss"]] == [2, 4]
    # An evaluation after the training, with the loss that it returned.
    assert [step for step, _ in expected["other_loss"]] == [4]
    # Four batches of two rows with 12 tokens; the third step ends an epoch of ten batches.
    assert run.ranks[0].curves["tokens"].points() == [(1, 96), (2, 96), (3, 48), (4, 96)]
    assert [step for step, _ in curves["seconds"]] == [1, 2, 3, 4]
    assert sorted(curves) == [
        "eval_loss",
        "grad_norm",
        "learning_rate",
        "loss",
        "other_loss",
        "seconds",
        "tokens a second",
    ]
    for rank in run.ranks.values():
        assert rank.ends
        assert "python" in rank.about["command"]
        assert rank.about["versions"].keys() == {"nxdpp", "torch", "transformers", "python"}
        assert (rank.about["done"], rank.about["steps"], list(rank.actions)) == (2, 4, [4])
