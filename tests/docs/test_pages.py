"""The harness of the pages: their code keeps its lines, and errors, texts, commands and links are found."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import anchors, commands, fragments, number_of_ranks, printed_text, relative_links, script
from tests.docs.test_guide import run_page
from tests.docs.torchrun import run

PAGE = """\
# A page, `of` code

See [this](other.md#a-heading), [that](https://example.org) and `[no](link.md)`.

```python
# ranks: 1
values = [1, 2]
```

<!-- fragment -->
```python
values = on_a_cluster()
```

```python
print(sum(values))
assert values == [2, 1]
```

<!-- prints -->
```text
3
```

<!-- prints on rank 1 -->
```text
other
```

```sh
# a comment
torchrun --nproc-per-node 2 \\
    train.py
```

## A page, `of` code
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


def test_a_page_is_read(page: Path) -> None:
    lines = script(page).splitlines()
    assert lines[6] == "values = [1, 2]"
    assert lines[15:] == ["print(sum(values))", "assert values == [2, 1]"]
    assert [block.text for block in fragments(page)] == ["values = on_a_cluster()"]
    assert number_of_ranks(page) == 1
    assert printed_text(page) == {0: "3", 1: "other"}
    assert [" ".join(command.split()) for _, command in commands(page)] == ["torchrun --nproc-per-node 2 train.py"]
    assert relative_links(page) == [(3, "other.md#a-heading")]
    assert anchors(page) == {"a-page-of-code", "a-page-of-code-1"}


def test_an_error_names_the_line_of_the_page(page: Path, tmp_path: Path) -> None:
    ended = run_page(page, tmp_path)
    assert ended.status == 1
    assert ended.outputs == ["3\n"]
    assert re.search(r'page\.md", line 17, in <module>\n(?:.*\n){1,2}AssertionError', ended.account)


# torchrun ends the other ranks after a first error. None raises before all ignore its signal.
_DRAWING = """import os, pathlib, random, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
folder = pathlib.Path(__file__).parent
(folder / os.environ["RANK"]).touch()
while not all((folder / rank).exists() for rank in "01"):
    time.sleep(0.01)
raise ValueError(f"rank {os.environ['RANK']} draws {random.random()}")
"""


def _written(text: str, folder: Path) -> Path:
    (folder / "script").mkdir()
    file = folder / "script" / "train.py"
    file.write_text(text)
    return file


def test_ranks_share_no_generator_and_all_their_errors_are_shown(tmp_path: Path) -> None:
    ended = run(_written(_DRAWING, tmp_path), 2)
    assert ended.status == 1
    drawn = dict(re.findall(r"^ValueError: rank (\d) draws ([\d.e-]+)$", ended.account, re.MULTILINE))
    assert list(drawn) == ["0", "1"], ended.account
    assert drawn["0"] != drawn["1"]


def test_a_script_without_an_end_is_ended(tmp_path: Path) -> None:
    file = _written("import time\ntime.sleep(1000)\n", tmp_path)
    with pytest.raises(AssertionError, match=r"no end after 5\.0 s"):
        run(file, 1, seconds=5.0)


def test_a_block_without_an_end_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("```python\nvalues = []\n")
    with pytest.raises(AssertionError, match="a block has no end"):
        script(path)
