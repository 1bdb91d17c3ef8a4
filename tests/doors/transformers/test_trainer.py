"""Losses, norms, learning rates and evaluations of ``PipelineTrainer`` are those of ``Trainer`` in one process."""

from collections.abc import Container, Iterable, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from torch.utils.data import DataLoader
from transformers import Trainer

from nxdpp import parallel_state, tensor_parallelize
from nxdpp.gradients.shards.local_tensors import is_sharded
from nxdpp.integrations import PipelineTrainer
from tests.doors.transformers.trainings import IMAGES_OF_CLASSES, REPLICATED, SHORT, TRAININGS, WITH_DROPOUT, Training
from tests.support.models import tied_llama
from tests.support.run_ranks import run_ranks

TOLERANCE = 1e-6
# Times, and figures made of them.
TIMES = ("runtime", "per_second")

MORE = (
    *("mean of batches", "clipped, cosine", "metrics", "stream", "images of classes", *SHORT),
    *("padded", "images in some rows", "budget of tokens", "metrics of batches", "images of internvl"),
    *("images of idefics3", "shuffled by torch"),
)
"""Trainings of two stages in the sweep: two replicas run them."""
LONE = (*SHORT, "images of classes")
"""Trainings that replicas of one stage run too."""
MORE_REPLICATED = ("accumulated", "bfloat16", "classes")

Logs = list[dict[str, float]]


def marked(names: Iterable[str], more: Container[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.sweep if name in more else ()) for name in names]


class Run(NamedTuple):
    """The logs of a training on one rank, and the text that it printed."""

    logs: Logs
    printed: str


def train(rank: int, folder: Path, names: list[str], replicas: int, stages: int = 2) -> dict[str, Run]:
    trainings = {**TRAININGS, "dropout": WITH_DROPOUT}
    runs = {name: _run(trainings[name], folder / name, replicas, pipeline_parallel_size=stages) for name in names}
    if replicas > 1:
        filled: Any = IMAGES_OF_CLASSES.trainer(PipelineTrainer, folder / "filled", pipeline_parallel_size=stages)
        with pytest.raises(ValueError, match=r"'pixel_values': 4.*count twice\. Set dataloader_drop_last=True"):
            filled.train()
        assert not filled.state.log_history
    return runs


def _run(training: Training, folder: Path, *others: Any, **pipeline: Any) -> Run:
    text = StringIO()
    with redirect_stdout(text):
        trainer: Any = training.trainer(PipelineTrainer, folder, *others, **pipeline)
        trainer.train()
    weights = list(trainer.pipelined.local_parameters())
    assert all(map(is_sharded, weights)) == any(map(is_sharded, weights)) == bool(trainer.args.fsdp)
    return Run(trainer.state.log_history, text.getvalue())


def sharded(training: Training, **config: Any) -> Training:
    return replace(training, args={**training.args, "fsdp": True, "fsdp_config": config})


SHARDED = {
    "evaluated": sharded(TRAININGS["evaluated"], cpu_offload=True),
    "accumulated": sharded(TRAININGS["accumulated"], reshard_after_forward=False),
    "adapted": sharded(TRAININGS["adapted"], activation_checkpointing=True),
}


class OwnLoaders(PipelineTrainer):
    """Loaders that are not divided over replicas."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        rows: Any = self.train_dataset
        return DataLoader(rows, batch_size=2)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        return self.get_train_dataloader()


def train_replicas(rank: int, folder: Path, names: list[str]) -> dict[str, Run]:
    runs = train(rank, folder, names, 2)
    own = Training().trainer(OwnLoaders, folder / "own", pipeline_parallel_size=2)
    for call in (own.train, own.evaluate):
        with pytest.raises(ValueError, match=r"to each of 2 data-parallel replicas\. Return self.accelerator.prepare"):
            call()
    for name in SHARDED:
        runs[f"{name}, sharded"] = _run(SHARDED[name], folder / "shards" / name, 2, pipeline_parallel_size=2)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(2, 2)
    divided = replace(TRAININGS["evaluated"], model=lambda: tensor_parallelize(tied_llama()))
    runs["divided"] = _run(divided, folder / "divided")
    return runs


@pytest.fixture(scope="module")
def one_pipeline(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Mapping[str, Run]]:
    names = [*asked(request, TRAININGS), "dropout"]
    return run_ranks(2, train, tmp_path_factory.mktemp("pipeline"), names, 1)


@pytest.fixture(scope="module")
def two_replicas(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Mapping[str, Run]]:
    names = [*dict.fromkeys(["metrics", *asked(request, REPLICATED)])]
    return run_ranks(4, train_replicas, tmp_path_factory.mktemp("replicas"), names)


@pytest.fixture(scope="module")
def lone_stages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Mapping[str, Run]]:
    return run_ranks(2, train, tmp_path_factory.mktemp("lone"), asked(request, LONE), 2, 1)


def asked(request: pytest.FixtureRequest, names: Iterable[str]) -> list[str]:
    """The trainings that tests with the fixture compare in this run."""
    asked = {
        item.callspec.params.get("name")
        for item in request.session.items
        if isinstance(item, pytest.Function) and request.fixturename in item.fixturenames and hasattr(item, "callspec")
    }
    return [name for name in names if name in asked]


@pytest.mark.parametrize("name", marked(TRAININGS, MORE))
def test_two_stages_train_as_one_process(name: str, one_pipeline: list[Mapping[str, Run]]) -> None:
    expected = _in_one_process(name)
    for runs in one_pipeline:
        assert_alike(runs[name].logs, expected)


@pytest.mark.parametrize("name", marked(REPLICATED, MORE_REPLICATED))
def test_replicas_train_as_one_process(name: str, two_replicas: list[Mapping[str, Run]]) -> None:
    assert_replicas_alike(name, two_replicas)


@pytest.mark.parametrize("name", LONE)
def test_replicas_of_one_stage_train_as_one_process(name: str, lone_stages: list[Mapping[str, Run]]) -> None:
    assert_replicas_alike(name, lone_stages)


def assert_replicas_alike(name: str, of_ranks: list[Mapping[str, Run]]) -> None:
    # Rows that fill a batch may be the longest ones, which pad it: the counter has the operations of the padding.
    unlike = "total_flos" if name == "19 rows, padded" else "nothing"
    for runs in of_ranks:
        assert_alike(*(without(unlike, logs) for logs in (runs[name].logs, _in_one_process(name, 2))))


def test_rank_0_orders_the_rows_of_stages_with_dropout(one_pipeline: list[Mapping[str, Run]]) -> None:
    first, second = (runs["dropout"].logs for runs in one_pipeline)
    assert sum("loss" in each for each in first) == 6
    assert_alike(second, first)


def test_the_speed_of_an_evaluation_counts_batches(two_replicas: list[Mapping[str, Run]]) -> None:
    logs = two_replicas[0]["metrics"].logs
    for evaluation in (each for each in logs if "eval_loss" in each):
        batches = evaluation["eval_steps_per_second"] * evaluation["eval_runtime"]
        # 11 rows are 3 batches of 2 on each replica.
        assert batches == pytest.approx(3, rel=0.05)


def test_rank_0_alone_prints(two_replicas: list[Mapping[str, Run]]) -> None:
    first, *others = two_replicas
    for name, run in first.items():
        assert run.printed.count("'loss'") == sum("loss" in each for each in run.logs)
        assert not any(other[name].printed for other in others)


def test_a_divided_model_trains_as_one_process(two_replicas: list[Mapping[str, Run]]) -> None:
    expected = _in_one_process("evaluated")
    for runs in two_replicas:
        assert_alike(runs["divided"].logs, expected)


@pytest.mark.parametrize("shards", SHARDED)
def test_shards_train_as_one_process(shards: str, two_replicas: list[Mapping[str, Run]]) -> None:
    expected = _in_one_process(shards, 2)
    for runs in two_replicas:
        assert_alike(runs[f"{shards}, sharded"].logs, expected)


@cache
def _in_one_process(name: str, replicas: int = 1) -> Logs:
    with TemporaryDirectory() as folder:
        trainer = TRAININGS[name].trainer(Trainer, Path(folder), replicas)
        trainer.train()
    return trainer.state.log_history


def assert_alike(ours: Logs, theirs: Logs) -> None:
    assert len(ours) == len(theirs)
    for own, other in zip(ours, theirs, strict=True):
        assert own.keys() == other.keys()
        for key, value in other.items():
            if not any(time in key for time in TIMES):
                assert own[key] == pytest.approx(value, abs=TOLERANCE, rel=0), key


def without(key: str, logs: Logs) -> Logs:
    return [{name: value for name, value in log.items() if key not in name} for log in logs]
