"""Graph of waits: all events happen, or some wait in a circle."""

from tests.schedules.transport_model.wait_graph import START, WaitGraph


def test_events_without_a_circle_all_happen() -> None:
    graph = WaitGraph()
    first = graph.event(START)
    second = graph.event(first, START)
    graph.wait(graph.event(), (first, second))

    assert graph.circle() == []


def test_a_circle_is_returned_in_its_order() -> None:
    graph = WaitGraph()
    outside = graph.event()
    events = [graph.event(outside) for _ in range(3)]
    for event, awaited in zip(events, events[1:] + events[:1], strict=True):
        graph.wait(event, (awaited,))
    # It waits for the circle and is no part of it.
    graph.event(events[0])

    circle = graph.circle()

    assert sorted(circle) == events
    start = events.index(circle[0])
    assert circle == events[start:] + events[:start]


def test_an_event_that_waits_for_itself() -> None:
    graph = WaitGraph()
    event = graph.event()
    graph.wait(event, (event,))

    assert graph.circle() == [event]
