"""The benchmark of checkpoints, with a small model."""

from pathlib import Path

import pytest

from benchmarks import checkpoint
from benchmarks.stored.ways import WAYS


def test_each_way_saves_and_loads_and_the_page_has_both_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    blocks = [f"<!-- checkpoint {what} -->\n<!-- end of checkpoint {what} -->\n" for what in ("saves", "loads")]
    page.write_text("\n".join(blocks))
    checkpoint.main(["--quick", "--write", str(page), "--folder", str(tmp_path)])
    text = page.read_text()
    for way in WAYS:
        assert text.count(f"| {way.title} ") == 2
    assert "on the disk (s)" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]
