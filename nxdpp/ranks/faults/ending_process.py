"""Output and exit of a process that ends because of a fault, and the file of its error that torchrun shows.

Without the file torchrun's last lines tell of an exit code, and the sentence that helps is above its trace::

    Root Cause (first observed failure):
      rank      : 2 (local_rank: 2)
      traceback : ValueError: inputs: LlamaForCausalLM.forward takes no ['lables'] (did you mean 'labels'?)
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

# Called with the sentence of the fault that ends this process, in the thread that ends it.
fault_listeners: list[Callable[[str], object]] = []


def print_line(line: str) -> None:
    """Write ``line`` to standard error directly: another thread may hold Python's buffers."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="backslashreplace"))


def exit_process(last: Callable[[], object] | None = None) -> NoReturn:
    """Exit at once with status 1, after the buffered output is written and ``last`` is called."""
    flush = threading.Thread(target=_flush, daemon=True)
    flush.start()
    # A pipe without a reader must not block the exit.
    flush.join(1.0)
    if last is not None:
        last()
    os._exit(1)


def wait_until(condition: Callable[[], bool], seconds: float, pause: float = 0.05) -> bool:
    """Return whether ``condition``, asked again after each ``pause``, became true within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(pause)
    return met


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def tell_launcher(sentence: str, is_consequence: bool = False) -> None:
    """Give ``sentence`` to ``fault_listeners``, and write it for torchrun, unless there is a file already.

    One that ``is_consequence`` replaces a file: torch's ``record`` has written the error of a lost connection there.
    The file appears whole: torchrun may end this process in the middle, and gives up on a file that it cannot parse.
    torchrun takes the earliest error for the cause, in whole seconds. A consequence comes after it.
    """
    for listener in list(fault_listeners):
        with contextlib.suppress(Exception):
            listener(sentence)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or (os.path.exists(path) and not is_consequence):
        return
    message = {"message": sentence, "extraInfo": {"timestamp": str(int(time.time()) + is_consequence)}}
    unfinished = Path(f"{path}.{os.getpid()}")
    with contextlib.suppress(OSError):
        unfinished.write_text(json.dumps({"message": message}), encoding="utf-8")
        unfinished.replace(path)


def sentence_of(error: BaseException) -> str:
    """The last lines of the traceback of ``error``: its class, text and notes."""
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
