"""Losses, norms, learning rates and evaluations of ``PipelineTrainer`` are those of ``Trainer`` in one process."""

from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import replace
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
from tests.doors.transformers.trainings import ADAPTED, LAYERS, LONE, REPLICATED, STAGES, WITH_DROPOUT, Training
from tests.support.models import tied_llama
from tests.support.run_ranks import run_ranks

TOLERANCE = 1e-6
# Times, and figures made of them.
TIMES = ("runtime", "per_second")

Logs = list[dict[str, float]]


class Run(NamedTuple):
    """The logs of a training on one rank, and the text that it printed."""

    logs: Logs
    printed: str


def train(rank: int, folder: Path) -> dict[str, Run]:
    """Train two stages, and then two replicas of one stage."""
    staged = {**STAGES, "dropout": WITH_DROPOUT}
    runs = {name: _run(each, folder / name, pipeline_parallel_size=2) for name, each in staged.items()}
    parallel_state.destroy_model_parallel()
    return runs | {name: _run(each, folder / name, pipeline_parallel_size=1) for name, each in LONE.items()}


def _run(training: Training, folder: Path, **pipeline: Any) -> Run:
    text = StringIO()
    with redirect_stdout(text):
        trainer: Any = training.trainer(PipelineTrainer, folder, **pipeline)
        trainer.train()
    weights = list(trainer.pipelined.local_parameters())
    assert all(map(is_sharded, weights)) == any(map(is_sharded, weights)) == bool(trainer.args.fsdp)
    return Run(trainer.state.log_history, text.getvalue())


# What one process trains, and the words of the shards.
SHARDED = {
    "evaluated": (STAGES["evaluated"], {"cpu_offload": True}),
    "adapted": (ADAPTED, {"activation_checkpointing": True, "reshard_after_forward": False}),
}


class OwnLoaders(PipelineTrainer):
    """Loaders that are not divided over replicas."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        rows: Any = self.train_dataset
        return DataLoader(rows, batch_size=2)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        return self.get_train_dataloader()


def train_replicas(rank: int, folder: Path) -> dict[str, Run]:
    runs = {name: _run(each, folder / name, pipeline_parallel_size=2) for name, each in REPLICATED.items()}
    own = Training().trainer(OwnLoaders, folder / "own", pipeline_parallel_size=2)
    for call in (own.train, own.evaluate):
        with pytest.raises(ValueError, match=r"to each of 2 data-parallel replicas\. Return self.accelerator.prepare"):
            call()
    for name, (training, config) in SHARDED.items():
        sharded = replace(training, args={**training.args, "fsdp": True, "fsdp_config": config})
        runs[f"{name}, sharded"] = _run(sharded, folder / "shards" / name, pipeline_parallel_size=2)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(2, 2)
    divided = replace(STAGES["evaluated"], model=lambda: tensor_parallelize(tied_llama(LAYERS)))
    runs["divided"] = _run(divided, folder / "divided")
    return runs


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Mapping[str, Run]]:
    return run_ranks(2, train, tmp_path_factory.mktemp("pipeline"))


@pytest.fixture(scope="module")
def two_replicas(tmp_path_factory: pytest.TempPathFactory) -> list[Mapping[str, Run]]:
    return run_ranks(4, train_replicas, tmp_path_factory.mktemp("replicas"))


@pytest.mark.parametrize("name", STAGES)
def test_two_stages_train_as_one_process(name: str, two_ranks: list[Mapping[str, Run]]) -> None:
    expected = _in_one_process(STAGES[name])
    for runs in two_ranks:
        assert_alike(runs[name].logs, expected)


@pytest.mark.parametrize("name", REPLICATED)
def test_replicas_train_as_one_process(name: str, two_replicas: list[Mapping[str, Run]]) -> None:
    expected = _in_one_process(REPLICATED[name], 2)
    for runs in two_replicas:
        assert_alike(runs[name].logs, expected)


@pytest.mark.parametrize("name", LONE)
def test_replicas_of_one_stage_train_as_one_process(name: str, two_ranks: list[Mapping[str, Run]]) -> None:
    expected = _in_one_process(LONE[name], 2)
    # Rows that fill a batch may be the longest ones, which pad it: the counter has the operations of the padding.
    unlike = "total_flos" if name == "19 rows, padded" else "nothing"
    for runs in two_ranks:
        assert_alike(*(without(unlike, logs) for logs in (runs[name].logs, expected)))


def test_rank_0_orders_the_rows_of_stages_with_dropout(two_ranks: list[Mapping[str, Run]]) -> None:
    first, second = (runs["dropout"].logs for runs in two_ranks)
    assert sum("loss" in each for each in first) == 6
    assert_alike(second, first)


def test_rank_0_alone_prints(two_replicas: list[Mapping[str, Run]]) -> None:
    first, *others = two_replicas
    for name, run in first.items():
        assert run.printed.count("'loss'") == sum("loss" in each for each in run.logs)
        assert not any(other[name].printed for other in others)


def test_a_divided_model_trains_as_one_process(two_replicas: list[Mapping[str, Run]]) -> None:
    expected = _in_one_process(STAGES["evaluated"])
    for runs in two_replicas:
        assert_alike(runs["divided"].logs, expected)


@pytest.mark.parametrize("name", SHARDED)
def test_shards_train_as_one_process(name: str, two_replicas: list[Mapping[str, Run]]) -> None:
    expected = _in_one_process(SHARDED[name][0], 2)
    for runs in two_replicas:
        assert_alike(runs[f"{name}, sharded"].logs, expected)


def _in_one_process(training: Training, replicas: int = 1) -> Logs:
    with TemporaryDirectory() as folder:
        trainer = training.trainer(Trainer, Path(folder), replicas)
        trainer.train()
    return trainer.state.log_history


def assert_alike(ours: Logs, theirs: Logs) -> None:
    assert len(ours) == len(theirs)
    for own, other in zip(ours, theirs, strict=True):
        assert own.keys() == other.keys()
        for key, value in other.items():
            if not any(time in key for time in TIMES):
                # Of large numbers a rounding of float32 is larger than the tolerance itself.
                assert own[key] == pytest.approx(value, abs=TOLERANCE, rel=TOLERANCE), key


def without(key: str, logs: Logs) -> Logs:
    return [{name: value for name, value in log.items() if key not in name} for log in logs]
