"""One processor core for each rank, where there are enough.

The kernel may keep two ranks that wake each other on one core for seconds, while another core is idle. A step then
takes twice as long, by chance. The planner has a core for each device.
"""

import os


def stay_on_core(rank: int, ranks: int) -> None:
    """Keep this thread, and threads that it starts later, on one core, if each of ``ranks`` has its own."""
    cores = sorted(os.sched_getaffinity(0))
    if ranks <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})
