"""Path of the example, so that tests import its modules under the names that it uses itself."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "llama"))
