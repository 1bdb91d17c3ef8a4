"""File of a rank's error, which torchrun shows at the end of its own output.

Without it torchrun's last lines tell of an exit code, and the sentence that helps is above its trace::

    Root Cause (first observed failure):
      rank      : 2 (local_rank: 2)
      traceback : ValueError: inputs: LlamaForCausalLM.forward takes no ['lables'] (did you mean 'labels'?)
"""

import contextlib
import json
import os
import time
from pathlib import Path


def tell_launcher(sentence: str, is_consequence: bool = False) -> None:
    """Write ``sentence`` for torchrun; does nothing without torchrun, or if there is a file already.

    One that ``is_consequence`` replaces a file: torch's ``record`` has written the error of a lost connection there.
    The file appears whole: torchrun may end this process in the middle, and gives up on a file that it cannot parse.
    torchrun takes the earliest error for the cause, in whole seconds. A consequence comes after it.
    """
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
