"""Work in which the last rank sleeps before exchanges: ``waiting_program.py PP TP EP CP FOLDER NAME ...``.

The sleeper writes ``sleeps`` with the name of the exchange,
and sleeps until a rank has judged a roll call. Verdicts end nothing here. Each is written as ``verdict`` with its
sentence.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import nxdpp
from nxdpp import NxDPPModel, parallel_state
from nxdpp.gradients.optimizer.zero1 import Zero1Optimizer
from nxdpp.ranks.faults import hang_watch, roll_call
from nxdpp.ranks.faults.board import Board, board

HANG_TIMEOUT = 1.0
_MOST_SECONDS = 45.0
_MICROBATCHES = 2


class _Sleeper(Board):
    """The board of a rank that sleeps before its first wait of each kind."""

    folder: Path
    names: set[str] = set()
    is_on = False

    @property
    def wait(self) -> object:
        return self.__dict__.get("wait")

    @wait.setter
    def wait(self, value: Any) -> None:
        if self.is_on and value is not None and value._name in self.names:
            self.names.remove(value._name)
            _say(f"sleeps: {value._name}")
            sleep_until(self.folder / str(len(self.names)))
        self.__dict__["wait"] = value


def sleep_until(told: Path) -> None:
    """Sleep until another rank has judged: it writes the file that has the number of this sleep."""
    Path(told.parent, "now").write_text(told.name)
    until = time.monotonic() + _MOST_SECONDS
    while not told.exists() and time.monotonic() < until:
        time.sleep(0.05)
    _say("wakes")


def _say(text: str) -> None:
    os.write(1, f"\n{text}\n".encode())


def _tell_verdicts(folder: Path) -> None:
    """Write each verdict with a sentence, and let the job go on."""

    def judged(*arguments: Any) -> Any:
        verdict = roll_call.judge(*arguments)
        if verdict.sentence:
            _say(f"verdict: {verdict.sentence}")
            (folder / (folder / "now").read_text()).touch()
        return dataclasses.replace(verdict, hangs=False, sentence="")

    vars(hang_watch)["judge"] = judged


@contextmanager
def _asleep(sleeper: bool, folder: Path, names: set[str]) -> Iterator[None]:
    if sleeper:
        board.__class__ = _Sleeper
        board.folder = folder  # type: ignore[attr-defined]  # of a _Sleeper
        board.names = names  # type: ignore[attr-defined]  # of a _Sleeper
        board.is_on = True  # type: ignore[attr-defined]  # of a _Sleeper
    yield
    if sleeper:
        board.is_on = False  # type: ignore[attr-defined]  # of a _Sleeper


def main() -> None:
    """Run the program."""
    (pipeline, tensor, experts, context), folder, names = map(int, sys.argv[1:5]), Path(sys.argv[5]), {*sys.argv[6:]}
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    parallel_state.initialize_model_parallel(
        tensor,
        pipeline,
        expert_model_parallel_size=experts,
        context_parallel_size=context,
        hang_timeout=HANG_TIMEOUT,
    )
    _tell_verdicts(folder)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4}
    sizes |= {"num_hidden_layers": max(2, pipeline), "tie_word_embeddings": True}
    module: Any = (
        nxdpp.expert_parallelize(MixtralForCausalLM(MixtralConfig(**sizes, num_key_value_heads=4, num_local_experts=2)))
        if experts > 1
        else LlamaForCausalLM(LlamaConfig(**sizes))
    )
    if tensor > 1:
        module = nxdpp.tensor_parallelize(module, sequence_parallel=True)
    module = nxdpp.context_parallelize(module)
    ids = torch.randint(32, (2 * _MICROBATCHES, 8), generator=torch.Generator().manual_seed(0))
    with _asleep(rank == ranks - 1, folder, names):
        replicas = parallel_state.get_replica_size()
        scaler = nxdpp.GradScaler("cpu", init_scale=2.0) if replicas == 1 else None
        model = NxDPPModel(
            module,
            num_microbatches=_MICROBATCHES,
            broadcast_and_average_loss=True,
            trace_file_path=str(folder / "trace.json"),
            grad_scaler=scaler,
        )
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if replicas > 1:
            optimizer = Zero1Optimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        for _ in range(2):
            model.run_train(input_ids=ids, labels=ids)
            if scaler is None:
                optimizer.step()
            else:
                scaler.unscale_(optimizer)
                model.clip_grad_norm_(1.0)
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        model.run_eval(input_ids=ids, labels=ids)
        half = {"input_ids": ids[:_MICROBATCHES], "labels": ids[:_MICROBATCHES]}
        model.steps.eval_microbatches([half] * _MICROBATCHES, outputs=True)
        nxdpp.save_checkpoint(str(folder / "out"), "1", model=model, optimizer=optimizer)
        nxdpp.load_checkpoint(str(folder / "out"), "1", model=model, optimizer=optimizer)
        nxdpp.gather_state_dict(model)
        nxdpp.save_pretrained(model, str(folder / "whole"))
        nxdpp.load_pretrained(model, str(folder / "whole"))
    _say(f"rank {rank} ends well")


if __name__ == "__main__":
    main()
