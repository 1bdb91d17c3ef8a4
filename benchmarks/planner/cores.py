"""One processor core for each rank.

The kernel may keep two ranks that wake each other on one core for seconds, while another core is idle. A step then
takes twice as long, by chance. The planner has a core for each device.
"""

import os


def stay_on_core(rank: int) -> None:
    """Keep this thread, and threads that it starts later, on one core; ranks take the cores in turn."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
