"""The pages about several models and optimizers print on 4 ranks what they print on 2, and what a script prints.

The scripts are those of ``whole_scripts.py``: one process, the whole batch, ``loss.backward()``.
"""

from pathlib import Path

import pytest

from tests.docs.pages import GUIDE, printed_text, script
from tests.docs.torchrun import run_forked
from tests.docs.whole_scripts import SCRIPTS, lines


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_page_prints_what_the_script_of_the_whole_batch_prints(name: str) -> None:
    assert list(lines(name)) == printed_text(GUIDE / f"{name}.md")[0].splitlines()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_page_prints_the_same_on_4_ranks(name: str, tmp_path: Path) -> None:
    page, file = GUIDE / f"{name}.md", tmp_path / "empty" / "train.py"
    text = script(page)
    assert text.count("pipeline_model_parallel_size=2") == 1
    file.parent.mkdir()
    file.write_text(text.replace("pipeline_model_parallel_size=2", "pipeline_model_parallel_size=4"))
    ended = run_forked(file, 4)
    assert ended.status == 0, ended.account
    printed = [line for line in ended.outputs[0].splitlines() if line]
    assert printed == printed_text(page)[0].strip().splitlines()
