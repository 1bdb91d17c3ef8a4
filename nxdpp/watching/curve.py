"""Values of a run by step, in a bounded number of points."""

# Points that a curve keeps at most, before each two neighbours become one.
MOST_POINTS = 2048


class Curve:
    """Values by step; of more than ``MOST_POINTS`` the means over 2, 4, 8, ... neighbouring steps, and the last one."""

    def __init__(self) -> None:
        self._bits = 0
        # By the number of a point: its last step, the sum of its values, and their number.
        self._points: dict[int, tuple[int, float, int]] = {}
        self._last = (0, 0.0)

    def add(self, step: int, value: float) -> None:
        """Add the value of ``step``; a later one replaces it, or joins its mean."""
        self._last = step, value
        self._join(step, value, 1)
        if len(self._points) > MOST_POINTS:
            points = sorted(self._points.values())
            self._bits += 1
            self._points = {}
            for point in points:
                self._join(*point)

    def forget_after(self, done: int) -> None:
        """Leave out the values of steps after ``done``; the point that has ``done`` remains."""
        self._points = {key: point for key, point in self._points.items() if key <= done >> self._bits}
        if self._points and self._last[0] > done:
            step, total, count = self._points[max(self._points)]
            self._last = min(step, done), total / count

    def points(self) -> list[tuple[int, float]]:
        """Return the last step and the mean value of each point, in the order of steps; at the end the last value."""
        found = [(step, total / count) for step, total, count in sorted(self._points.values())]
        return [*found[:-1], self._last] if found and found[-1][0] <= self._last[0] else found

    def _join(self, step: int, total: float, count: int) -> None:
        earlier = self._points.get(step >> self._bits) if self._bits else None
        if earlier is not None:
            step, total, count = max(step, earlier[0]), total + earlier[1], count + earlier[2]
        self._points[step >> self._bits] = step, total, count
