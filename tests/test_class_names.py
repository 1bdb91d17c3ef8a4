"""Each class name is unique in the package, private names too: a name that a reader meets has one meaning."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_class_names_are_unique() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "nxdpp").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    twice = [f"{name}: {', '.join(found)}" for name, found in places.items() if len(found) > 1]
    assert not twice, "\n".join(["rename all but one, by what each is about:", *twice])
