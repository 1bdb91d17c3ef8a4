"""Lines of transformers' loggers: each text once a job."""

import io
import logging

from nxdpp import parallel_state
from nxdpp.ranks.said_once import LIBRARY
from tests.support.run_ranks import run_ranks


def say(rank: int) -> str:
    printed = io.StringIO()
    library = logging.getLogger(LIBRARY)
    library.addHandler(logging.StreamHandler(printed))
    library.setLevel(logging.WARNING)
    parallel_state.initialize_model_parallel()
    logger = logging.getLogger(f"{LIBRARY}.models.llama")
    for _ in range(2):
        logger.warning("of all ranks")
    logger.warning(f"of rank {rank}")
    return printed.getvalue()


def test_a_text_of_all_ranks_is_printed_once_each_time() -> None:
    printed = run_ranks(3, say)
    assert "".join(printed).count("of all ranks") == 2
    assert all(f"of rank {rank}" in each for rank, each in enumerate(printed))
