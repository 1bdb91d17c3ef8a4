"""Each promise of tests/README.md has its test in the suite."""

import re
from pathlib import Path

HERE = Path(__file__).parents[1]
ROWS = [row for row in (HERE / "README.md").read_text().splitlines() if re.match(r"\| (?!promise )", row)]


def test_each_promise_has_a_test_that_is_there() -> None:
    assert len(ROWS) > 50
    for row in ROWS:
        (name,) = re.findall(r"`([\w/]+\.py(?:::\w+)?)`", row)
        file, _, function = name.partition("::")
        text = (HERE / file).read_text()
        assert f"def {function or 'test_'}" in text, row
