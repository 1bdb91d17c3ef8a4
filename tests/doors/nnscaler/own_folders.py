"""``parallelize`` with a ``gen_savedir`` of its own for each call: plans of other calls neither fit nor hinder."""

import os
from itertools import count
from pathlib import Path
from typing import Any

from nxdpp import nnscaler

VARIABLE = "NXDPP_TEST_PLANS"
"""Environment variable with the folder of a test, which its ranks have too."""

_calls = count()


def parallelize(*args: Any, **kwargs: Any) -> nnscaler.ParallelModule | type[nnscaler.ParallelModule] | None:
    """Call ``nnscaler.parallelize``. All ranks make their calls in one order: they count alike."""
    folder = Path(os.environ[VARIABLE]) / str(next(_calls))
    return nnscaler.parallelize(*args, **{"gen_savedir": folder, **kwargs})
