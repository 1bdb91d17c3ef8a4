"""File of a rank's error, which torchrun shows at the end of its own output.

Without it torchrun's last lines tell of an exit code, and the sentence that helps is above its trace::

    Root Cause (first observed failure):
      rank      : 2 (local_rank: 2)
      traceback : ValueError: inputs: LlamaForCausalLM.forward takes no ['lables'] (did you mean 'labels'?)
"""

import contextlib
import json
import math
import os
import time

_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def tell_launcher(sentence: str, is_consequence: bool = False) -> None:
    """Write ``sentence`` for torchrun; does nothing without torchrun, or if there is a file already.

    torchrun takes the earliest error for the cause, in whole seconds. One that ``is_consequence`` comes after it.
    """
    path = os.environ.get(_VARIABLE)
    if not path or os.path.exists(path):
        return
    seconds = math.ceil(time.time()) if is_consequence else int(time.time())
    message = {"message": sentence, "extraInfo": {"timestamp": str(seconds)}}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": message}, file)


def sentence_of(error: BaseException) -> str:
    """The last lines of the traceback of ``error``: its class, text and notes."""
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
