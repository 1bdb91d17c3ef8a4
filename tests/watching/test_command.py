"""``python -m nxdpp watch`` and ``report``."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import pytest

from nxdpp.__main__ import main
from nxdpp.watching.page import page
from tests.watching.runs import lines, step, whole_run


def test_one_frame_and_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_run(tmp_path)
    # A line has 80 columns, and a folder of pytest-xdist takes most of them.
    monkeypatch.chdir(tmp_path)
    folder = "."
    assert main(["watch", folder, "--once"]) == 0
    once = capsys.readouterr().out
    assert "step 20 of 40" in once
    # Without a terminal it is the same.
    assert main(["watch", folder]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == once.splitlines()[2:]
    assert max(map(len, once.splitlines())) <= 80

    assert main(["report", folder]) == 0
    assert capsys.readouterr().out == "report.html\n"
    assert '"step": 20' in (tmp_path / "report.html").read_text()
    assert main(["report", folder, "--output", str(tmp_path / "no" / "a.html")]) == 2
    assert capsys.readouterr().err.startswith("nxdpp report: ")


def test_flags_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(whole_run(tmp_path)), "--port", "9"]) == 2
    assert "nxdpp watch: --port needs --web: add it, or leave out --port." in capsys.readouterr().err
    assert main(["watch", str(tmp_path / "absent")]) == 2
    assert "has no metrics/rank0000.jsonl." in capsys.readouterr().err


def test_torch_is_not_imported(tmp_path: Path) -> None:
    whole_run(tmp_path)
    program = f"import sys; from nxdpp.__main__ import main; main(['watch', {str(tmp_path)!r}, '--once']); "
    program += "print('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert printed.splitlines()[-1] == "False"


def test_a_terminal_follows_the_run_until_ctrl_c(tmp_path: Path) -> None:
    whole_run(tmp_path)
    process, terminal = _started(["watch", "."], tmp_path)
    shown = _read_until(terminal, "step 20 of 40")
    lines(tmp_path, 0, step(0, 21))
    assert "step 20 of 40" in shown
    _read_until(terminal, "step 21 of 40")
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 0
    assert "Traceback" not in _read_until(terminal, None)


def _started(arguments: list[str], folder: Path) -> "tuple[subprocess.Popen[bytes], int]":
    """Start the command in a terminal of 80 columns; return it with the terminal's other end."""
    own, its = os.openpty()
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24", "PYTHONPATH": path}
    command = [sys.executable, "-m", "nxdpp", *arguments]
    process = subprocess.Popen(
        command,
        stdin=its,
        stdout=its,
        stderr=its,
        env=environment,
        cwd=folder,
        start_new_session=True,
        # A worker of pytest-xdist ignores it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(its)
    return process, own


def _read_until(terminal: int, text: str | None) -> str:
    """Return what a terminal shows until ``text``, or until its end."""
    shown = ""
    # Linux ends a terminal without a process by an error.
    with suppress(OSError):
        while (text is None or text not in shown) and (part := os.read(terminal, 4096)):
            shown += part.decode()
    return shown


def test_the_page_is_served_until_ctrl_c(tmp_path: Path) -> None:
    whole_run(tmp_path)
    process, terminal = _started(["watch", ".", "--web", "--port", "0"], tmp_path)
    shown = _read_until(terminal, "HOST")
    found = re.search(r"http://127\.0\.0\.1:\d+/", shown)
    assert found is not None
    with urlopen(found[0], timeout=10) as answer:
        assert answer.read().decode() == page()
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 0
    assert "Traceback" not in _read_until(terminal, None)
