"""``.ci/newest`` prints which private names have gone or changed in the versions that it has installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What `python -m venv` makes, with this environment for the one that pip would fill.
_VENV = f"""#!/bin/sh
mkdir -p "$3/bin"
printf '#!/bin/sh\\n' >"$3/bin/pip"
printf '#!/bin/sh\\nexec {sys.executable} "$@"\\n' >"$3/bin/python"
chmod +x "$3"/bin/*
"""


def report(tmp_path: Path, *arguments: str) -> tuple[int, list[str]]:
    """Return the exit status and the lines of ``.ci/newest`` with ``arguments``."""
    python = tmp_path / "python"
    python.write_text(_VENV)
    python.chmod(0o755)
    ran = subprocess.run(
        [ROOT / ".ci/newest", "-n", "0", "tests/ground/test_names.py", *arguments],
        env={**os.environ, "PYTHON": str(python), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    return ran.returncode, ran.stdout.splitlines()


@pytest.mark.sweep
def test_names_that_have_gone_or_changed_are_printed_before_the_tests(tmp_path: Path) -> None:
    chosen = ["-k", "_assert_async or _detect_is_causal_mask or Tensor._version"]
    status, (versions, *lines) = report(tmp_path, "-p", "tests.ground.changed_names", *chosen)
    assert status == 1
    assert "torch " in versions
    use = "compares a mask of nn.TransformerEncoder in every step"
    assert lines[:3] == [
        "2 private names have gone or changed",
        "  torch._assert_async has gone or changed; with it nxdpp divides the rows of a check as those of its argument",
        f"  torch.nn.modules.transformer._detect_is_causal_mask has changed; with it nxdpp {use}",
    ]
    assert lines[3] == "2 tests failed"
    assert all("test_the_installed_version_has_the_name" in line for line in lines[4:6])
    # The line of pytest, or triton's after it.
    assert len(lines) == 7
