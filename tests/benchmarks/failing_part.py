"""Cases that pass, differ, raise and hang, for the tests of what starts them."""

import time

from benchmarks.first_hour.place import Found, Rank


def run(rank: Rank, case: str) -> Found:
    """Do what the name of the case says."""
    if case == "raises":
        raise ValueError("the first error")
    if case == "hangs":
        time.sleep(1000)
    return Found({"rank": rank.number}, "another number" if case == "differs" else "")
