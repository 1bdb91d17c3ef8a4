"""The benchmark of checkpoints, with a small model."""

from pathlib import Path

import pytest

from benchmarks import checkpoint
from benchmarks.stored.ways import WAYS


def test_each_way_saves_and_loads_and_the_page_has_the_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    names = (checkpoint.SAVES, checkpoint.LOADS, checkpoint.STEPS)
    blocks = [f"<!-- {name} -->\n<!-- end of {name} -->\n" for name in names]
    page.write_text("\n".join(blocks))
    checkpoint.main(["--quick", "--write", str(page), "--folder", str(tmp_path)])
    text = page.read_text()
    for way in WAYS[False]:
        contents = sum(way in ways for ways in WAYS.values())
        assert text.count(f"| {way.title} ") == contents * (1 + way.loads)
    assert "on the disk (s)" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]
