"""Curves that keep a bounded number of points."""

from nxdpp.watching.metrics_reader import MOST_POINTS, Curve


def test_few_values_are_kept_as_they_are() -> None:
    curve = Curve()
    for step, value in ((1, 4.0), (2, 9.0), (2, 3.0), (5, 1.0)):
        curve.add(step, value)
    assert curve.points() == [(1, 4.0), (2, 3.0), (5, 1.0)]
    curve.forget_after(2)
    assert curve.points() == [(1, 4.0), (2, 3.0)]


def test_many_values_become_means_and_the_last_remains() -> None:
    curve = Curve()
    for step in range(5 * MOST_POINTS):
        curve.add(step, float(step))
    points = curve.points()
    assert MOST_POINTS // 2 <= len(points) <= MOST_POINTS
    assert points[:2] == [(7, 3.5), (15, 11.5)]
    assert points[-1] == (5 * MOST_POINTS - 1, 5.0 * MOST_POINTS - 1)
    curve.forget_after(15)
    assert curve.points() == [(7, 3.5), (15, 11.5)]
    curve.add(16, 1.0)
    assert curve.points()[-1] == (16, 1.0)
    curve.forget_after(-1)
    assert curve.points() == []
