"""Each promise of tests/README.md has its test in the suite."""

import ast
import re
from pathlib import Path

HERE = Path(__file__).parents[1]
ROWS = [row for row in (HERE / "README.md").read_text().splitlines() if re.match(r"\| (?!promise )", row)]


def test_each_promise_has_a_test_that_is_there() -> None:
    assert len(ROWS) > 50
    for row in ROWS:
        (name,) = re.findall(r"`([\w/]+\.py(?:::\w+)?)`", row)
        file, _, function = name.partition("::")
        tests = [
            each
            for each in ast.walk(ast.parse((HERE / file).read_text()))
            if isinstance(each, ast.FunctionDef) and each.name.startswith(function or "test_")
        ]
        marks = [set(map(ast.unparse, each.decorator_list)) for each in tests if each.name == function or not function]
        # The mark on some cases leaves others to the suite.
        assert any("pytest.mark.sweep" not in each for each in marks), row
