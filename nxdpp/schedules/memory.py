"""Microbatches that a stage holds over the actions of a schedule."""

from collections import defaultdict

from nxdpp.schedules.actions import Action, Schedule
from nxdpp.schedules.simulate import in_flight_peaks


def in_flight(schedule: Schedule) -> list[int]:
    """Return for each stage the most microbatches between their forward and the end of their backward.

    The stages of a rank may reach their peaks at different times.
    """
    of_stage: defaultdict[int, list[Action]] = defaultdict(list)
    for action in (action for actions in schedule for action in actions):
        of_stage[action.stage].append(action)
    return in_flight_peaks([of_stage[stage] for stage in range(len(of_stage))])
