"""The page of a run: one file without requests to elsewhere, and its server, which answers only this machine."""

import json
import re
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread

import pytest

from nxdpp.watching.metrics_reader import RunMetrics
from nxdpp.watching.page import page, server
from nxdpp.watching.summary import summary_of
from tests.watching.runs import BEGAN, lines, step, whole_run


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """The port of a server of the run in ``tmp_path``."""
    with server(RunMetrics(whole_run(tmp_path)), 0) as served:
        thread = Thread(target=served.serve_forever, args=(0.01,))
        thread.start()
        yield served.server_address[1]
        served.shutdown()
        thread.join()


def _get(port: int, path: str, host: str | None = None) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def _data(text: str) -> object:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_server_answers_with_the_run_of_the_moment(port: int, tmp_path: Path) -> None:
    assert _get(port, "/") == (200, page())
    status, text = _get(port, "/data")
    assert (status, json.loads(text)["step"]) == (200, 20)
    lines(tmp_path, 0, step(0, 21))
    assert json.loads(_get(port, "/data")[1])["step"] == 21
    assert _get(port, "/other")[0] == 404


def test_only_pages_of_this_machine_read_it(port: int) -> None:
    """A page elsewhere whose name leads to 127.0.0.1 sends that name."""
    hosts = {"localhost:9": 200, "127.0.0.1": 200, "elsewhere.example:80": 403, "": 403}
    assert {host: _get(port, "/data", host)[0] for host in hosts} == hosts


def test_a_report_has_its_data_inside(tmp_path: Path) -> None:
    strange = tmp_path / "</script><b>"
    summary = summary_of(RunMetrics(whole_run(strange)), BEGAN)
    text = page(summary)
    assert _data(page()) is None
    assert _data(text) == json.loads(json.dumps(summary))
    assert text.count("</script>") == page().count("</script>") == 2


def test_the_page_asks_nothing_elsewhere_and_is_short() -> None:
    text = page()
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<link[^>]+stylesheet|<script[^>]+src=|@import|innerHTML", text)
    assert text.count("\n") < 300
    assert "prefers-color-scheme: dark" in text
