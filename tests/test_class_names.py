"""Each class name is unique in the package, private names too: a name that a reader meets has one meaning."""

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_class_names_are_unique() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "nxdpp").rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if found := re.match(r"\s*class (\w+)[:(]", line):
                places[found[1]].append(f"{path.relative_to(ROOT)}:{number}")
    twice = [f"{name}: {', '.join(each)}" for name, each in places.items() if len(each) > 1]
    assert not twice, "\n".join(["rename all but one, by what each is about:", *twice])
