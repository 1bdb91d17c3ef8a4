"""A run as a page: one HTML file with its data inside, or served to this machine's browsers only."""

import json
import sys
import time
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from nxdpp.watching.metrics_reader import RunMetrics
from nxdpp.watching.summary import summary_of

_PAGE = Path(__file__).with_name("page.html")
# In the page, the text of the data; null lets it ask the server.
_DATA = '<script id="data" type="application/json">null</script>'
_HOSTS = ("127.0.0.1", "localhost")
# The page asks only its own server.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page(summary: dict[str, Any] | None = None) -> str:
    """Return the page, with ``summary`` inside or for a server."""
    text = _PAGE.read_text(encoding="utf-8")
    assert _DATA in text, "the page has a place for its data"
    if summary is None:
        return text
    # A name must not end the script.
    data = json.dumps(summary, allow_nan=False).replace("<", "\\u003c")
    return text.replace(_DATA, _DATA.replace("null", data))


def server(run: RunMetrics, port: int) -> ThreadingHTTPServer:
    """Return a server of the page on 127.0.0.1; ``port`` 0 is any that is free. Raises ``OSError`` for one in use."""
    return _Server(("127.0.0.1", port), partial(_Handler, run, Lock()))


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the error of an answer, unless the browser has closed its tab."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Answers ``/`` with the page and ``/data`` with the run of this moment."""

    def __init__(self, run: RunMetrics, lock: Lock, *request: Any) -> None:
        self._run, self._lock = run, lock
        super().__init__(*request)

    def do_GET(self) -> None:
        """Answer a request that names this machine as its host: another name is a page elsewhere."""
        if self.headers.get("Host", "").split(":")[0] not in _HOSTS:
            self.send_error(HTTPStatus.FORBIDDEN, "only for 127.0.0.1 and localhost")
        elif self.path == "/":
            self._answer("text/html; charset=utf-8", page())
        elif self.path == "/data":
            with self._lock:
                self._run.read_on()
                found = summary_of(self._run, time.time())
            self._answer("application/json", json.dumps(found, allow_nan=False))
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _answer(self, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *values: Any) -> None:
        """Print nothing for a request."""
