"""Lets the tests import the example's modules by the names by which they import each other."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "llama"))
