"""Graph of waits: events, and for each the events before it. Without a circle, all of them happen."""

from collections import deque
from collections.abc import Iterable

# Number of an event. ``START`` has happened from the beginning.
Event = int
START: Event = 0


class WaitGraph:
    """Events by number."""

    def __init__(self) -> None:
        self._followers: list[list[Event]] = [[]]
        self._awaited = [0]

    def event(self, *before: Event) -> Event:
        """Add an event that happens after those ``before``."""
        number, followers = len(self._awaited), self._followers
        followers.append([])
        awaited = 0
        # Most events of a step have the event before on the host and in the queue: often the same one.
        for earlier in {*before}:
            if earlier != START:
                followers[earlier].append(number)
                awaited += 1
        self._awaited.append(awaited)
        return number

    def wait(self, event: Event, before: Iterable[Event]) -> None:
        """Let ``event`` happen after those ``before`` too."""
        followers, awaited = self._followers, self._awaited
        for earlier in before:
            if earlier != START:
                followers[earlier].append(event)
                awaited[event] += 1

    def circle(self) -> list[Event]:
        """Return events that wait for each other, each for the next one and the last for the first; or nothing."""
        awaited = self._awaited.copy()
        ready = deque(event for event, count in enumerate(awaited) if not count)
        happened = 0
        while ready:
            happened += 1
            for follower in self._followers[ready.popleft()]:
                awaited[follower] -= 1
                if not awaited[follower]:
                    ready.append(follower)
        return [] if happened == len(awaited) else self._one_circle(awaited)

    def _one_circle(self, awaited: list[int]) -> list[Event]:
        """Go from an event that never happens to one that it waits for, until one comes a second time."""
        waits_for = {
            follower: event for event, count in enumerate(awaited) if count for follower in self._followers[event]
        }
        path: dict[Event, None] = {}
        event = next(event for event, count in enumerate(awaited) if count)
        while event not in path:
            path[event] = None
            event = waits_for[event]
        events = list(path)
        return events[events.index(event) :]
