"""Times that decide about the spine are refused; times that are logged are not."""

import copy
import datetime as dates
import logging
import time
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from time import localtime, perf_counter, time_ns
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxdpp.tracing.errors import TracingError
from tests.support.traced_models import PlainLayer, PlainModel, options_for, trace_with

LIMIT = 1e12


class Model(PlainModel):
    def __init__(self, use: Callable[[Any], Any]) -> None:
        super().__init__()
        self.use = use
        self.started = time.time()
        self.started_at = datetime.now()
        self.longest = 0.0
        self.times: dict[str, float] = {}

    def prepare(self, hidden: Tensor) -> Tensor:
        return hidden * 2 if self.use(self) is True else hidden


class Timer:
    def __enter__(self) -> "Timer":
        self.start = perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = perf_counter() - self.start


def a_timer(model: Any) -> None:
    with Timer() as timer:
        pass
    print(f"{timer.seconds:.3f}", timer.seconds * 1e3, int(timer.seconds * 1000), round(timer.seconds, 2))


def a_log(model: Any) -> None:
    logging.getLogger("test").warning("after %.1f s, %d ns, %s", time.time() - model.started, time_ns(), time.ctime())


def dates_in_a_log(model: Any) -> None:
    now = dates.datetime.now()
    took = now - model.started_at
    print(f"{now:%H:%M} {now} {now.isoformat()} {took} {took.total_seconds():.1f} {now.hour:02d} {date.today()}")
    print(
        time.strftime("%H:%M:%S", localtime()), time.strftime("%d", time.gmtime(now.timestamp())), localtime().tm_hour
    )
    print(
        copy.deepcopy(now), datetime(2020, 1, 1) < datetime(2021, 1, 1), isinstance(now, datetime), now.tzinfo is None
    )


def an_entry(model: Any) -> Any:
    model.times["last"] = time.monotonic()
    return model.times["last"]


COMPARED: dict[str, Callable[[Any], Any]] = {
    "remainder": lambda model: bool(time.time_ns() % 2) and None,
    "remainder of another name": lambda model: time_ns() % 2 == 5,
    "since the start": lambda model: time.time() - model.started > LIMIT,
    "number on the left": lambda model: LIMIT < time.time(),  # noqa: SIM300
    "in seconds": lambda model: time_ns() * 1e-9 > LIMIT,
    "maximum": lambda model: max(model.longest, perf_counter()) < 0,
    "divmod": lambda model: divmod(time.time(), 60)[1] == 61,
    "rounded": lambda model: round(time.time()) % 2 == 3,
    "hour": lambda model: datetime.now().hour == 25,
    "date of another name": lambda model: dates.datetime.now(UTC).minute % 2 == 7,
    "today": lambda model: date.today() < date(1999, 1, 1),
    "date on the right": lambda model: datetime(1999, 1, 1) > datetime.now(),
    "elapsed": lambda model: datetime.now() - model.started_at > timedelta(days=9),
    "elapsed seconds": lambda model: (datetime.now() - model.started_at).total_seconds() > LIMIT,
    "of a timestamp": lambda model: datetime.fromtimestamp(time.time()).day == 77,
    "weekday": lambda model: (datetime.now() + timedelta(hours=1)).weekday() > 6,
    "local time": lambda model: localtime().tm_hour > 24,
    "universal time": lambda model: time.gmtime()[3] > 24,
    "after a store": lambda model: an_entry(model) < 0,
}
LOGGED: dict[str, Callable[[Any], Any]] = {
    "a timer": a_timer,
    "a log": a_log,
    "an entry": an_entry,
    "dates": dates_in_a_log,
}


def _trace(model: nn.Module, tracer: str) -> Any:
    return trace_with(model, {"x": torch.ones(3, 4)}, options_for(model, PlainLayer, tracer_cls=tracer))


@pytest.mark.parametrize("tracer", ["hf", "torch"])
@pytest.mark.parametrize("compare", COMPARED.values(), ids=COMPARED)
def test_a_time_that_is_compared_is_refused(compare: Callable[[Any], Any], tracer: str) -> None:
    with pytest.raises(TracingError, match=r"compares a time(.|\n)* at .*test_clocks\.py:\d+, in "):
        _trace(Model(compare), tracer)


@pytest.mark.parametrize("log", LOGGED.values(), ids=LOGGED)
def test_a_time_that_is_logged_is_allowed(log: Callable[[Any], Any]) -> None:
    model = Model(log)
    _trace(model, "hf")
    assert type(time.time()) is float
    assert type(datetime.now()) is datetime is dates.datetime
    assert not model.times


def test_a_whole_number_of_seconds_differs_in_the_second_run(monkeypatch: pytest.MonkeyPatch) -> None:
    # No second ends between the two runs.
    monkeypatch.setattr(time, "time", lambda: 1000.25)
    with pytest.raises(TracingError, match="two runs"):
        _trace(Model(lambda model: int(time.time()) % 2 == 0), "hf")


class ByTime(nn.Module):
    """A module without layers, which runs in each step."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if time.time() < 0 else x


class WithModule(PlainModel):
    def __init__(self) -> None:
        super().__init__()
        self.by_time = ByTime()

    def prepare(self, hidden: Tensor) -> Tensor:
        return self.by_time(hidden)  # type: ignore[no-any-return]


def test_the_remedy_traces() -> None:
    _trace(WithModule(), "hf")
