"""The branches of docs/guide/logging.md for TensorBoard and W&B run, with modules in the place of both libraries.

The tests install neither: what they do with a number is theirs. The modules have the names and arguments that the page
uses, and write what they get.
"""

import json
from pathlib import Path
from typing import Any

from tests.docs.pages import GUIDE, script
from tests.docs.torchrun import run_forked

TENSORBOARD = '''\
"""torch.utils.tensorboard imports this module, then its writer, which reads the files of TensorBoard."""

import json
import os
import sys
from types import ModuleType

__version__ = "2.20.0"


class SummaryWriter:
    def __init__(self, log_dir=None):
        os.makedirs(log_dir)
        self.file = open(f"{log_dir}/rank{os.environ['RANK']}.jsonl", "w")

    def add_scalar(self, tag, scalar_value, global_step=None):
        self.file.write(json.dumps([tag, scalar_value, global_step]) + "\\n")

    def close(self):
        self.file.close()


writer = ModuleType("torch.utils.tensorboard.writer")
writer.SummaryWriter = writer.FileWriter = SummaryWriter
records = ModuleType("tensorboard.summary.writer.record_writer")
records.RecordWriter = None
for module in (writer, records, ModuleType("tensorboard.summary"), ModuleType("tensorboard.summary.writer")):
    sys.modules[module.__name__] = module
'''
WANDB = """\
import json
import os


class Run:
    def __init__(self, project, config):
        self.lines = [[project, config["num_hidden_layers"]]]

    def log(self, data, step=None):
        self.lines += [[name, value, step] for name, value in data.items()]

    def finish(self):
        with open(f"wandb{os.environ['RANK']}.jsonl", "w") as file:
            file.writelines(json.dumps(line) + "\\n" for line in self.lines)


def init(project=None, config=None):
    return Run(project, config)
"""


def _lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_both_writers_get_the_losses_of_one_rank(tmp_path: Path) -> None:
    for name, text in (("tensorboard", TENSORBOARD), ("wandb", WANDB), ("train", script(GUIDE / "logging.md"))):
        (tmp_path / f"{name}.py").write_text(text)
    ended = run_forked(tmp_path / "train.py", 2)
    assert ended.status == 0, ended.account
    (written,) = (tmp_path / "out/tensorboard").iterdir()
    (logged,) = tmp_path.glob("wandb*.jsonl")
    assert (written.name, logged.name) == ("rank0.jsonl", "wandb0.jsonl")
    about, *of_wandb = _lines(logged)
    assert about == ["llama", 2]
    assert of_wandb == _lines(written)
    assert [(name, step) for name, _, step in of_wandb] == [("loss", step) for step in range(4)]
    assert all(2.0 < loss < 4.6 for _, loss, _ in of_wandb)
