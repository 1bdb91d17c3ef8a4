"""The page of a run in Chromium: ``python -m tests.watching.browser OUT``, with playwright and a Chromium installed.

A command of its own: neither the suite nor ``.ci/run`` calls it.

It serves a made-up run with experts, a long name and a curve of one point, looks at 1200 and at 400 pixels, light and
dark, and writes a screenshot of each. It fails for a request to elsewhere, an error of the page's script, a page that
is wider than its window, and a step that does not appear.
"""

import re
import sys
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

from nxdpp.watching.metrics_reader import RunMetrics
from nxdpp.watching.page import server
from tests.watching.runs import BEGAN, lines, step, whole_run

MORE = {"experts": [30, 10, 20, 20], "a_name_of_a_number_of_the_user_that_is_wider_than_its_box": 1.0}

DIED = "stops because rank 1 died without an error: killed by a signal or out of memory, crashed, or ended by os._exit"


def main(out: Path) -> None:
    """Look at the page in each size and scheme."""
    from playwright.sync_api import sync_playwright  # type: ignore[import-not-found]  # not among the tests' packages

    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = whole_run(Path(name))
        with server(RunMetrics(folder), 0) as served:
            Thread(target=served.serve_forever, daemon=True).start()
            address = f"http://127.0.0.1:{served.server_address[1]}/"
            browser = playwright.chromium.launch(executable_path=which("chromium"), args=["--no-sandbox"])
            last = 20
            for width in (1200, 400):
                for scheme in ("light", "dark"):
                    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
                    last += 1
                    _look(page, address, folder, last)
                    page.screenshot(path=out / f"{width}-{scheme}.png", full_page=True)
                    page.close()
            lines(folder, 0, {"time": BEGAN + 12, "fault": DIED})
            page = browser.new_page(viewport={"width": 400, "height": 800})
            page.goto(address)
            page.get_by_text("rank 1 died without an error").wait_for()
            page.screenshot(path=out / "400-fault.png", full_page=True)
            browser.close()
            served.shutdown()


def _look(page: Any, address: str, folder: Path, last: int) -> None:
    requests: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(address)
    page.get_by_text(f"step {last - 1} of 40").wait_for()
    lines(folder, 0, step(0, last, **MORE))
    page.get_by_text(f"step {last} of 40").wait_for()
    page.get_by_text("4 experts: the most is 1.5 of the mean").wait_for()
    assert page.title().startswith(f"step {last} · ")
    page.locator("#curves svg").first.hover()
    # The value under the pointer; the axis has "step 1" too.
    page.get_by_text(re.compile(r"step \d+: ")).first.wait_for()
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide == 0, f"the page is {wide} pixels wider than its window"
    assert not errors, errors
    elsewhere = [url for url in requests if not url.startswith((address, "data:"))]
    assert not elsewhere, elsewhere


if __name__ == "__main__":
    main(Path(sys.argv[1]))
