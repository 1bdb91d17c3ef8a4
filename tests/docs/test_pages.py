"""The harness of the pages: their code keeps its lines, and errors, texts, commands and links are found."""

from pathlib import Path

import pytest

from tests.docs.pages import anchors, commands, fragments, number_of_ranks, printed_text, relative_links, script

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
