"""The pages about several models and optimizers print on 4 ranks what they print on 2, and what a script prints.

The scripts are those of ``whole_scripts.py``: one process, the whole batch, ``loss.backward()``.
"""

import pytest

from tests.docs.pages import GUIDE, printed_text
from tests.docs.whole_scripts import SCRIPTS, lines


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_page_prints_what_the_script_of_the_whole_batch_prints(name: str) -> None:
    assert list(lines(name)) == printed_text(GUIDE / f"{name}.md")[0].splitlines()
