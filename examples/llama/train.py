"""Training of a byte-level Llama on real text, on one process or as a pipeline of several.

    python examples/llama/train.py
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 examples/llama/train.py
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 examples/llama/train.py --schedule zb1p --trace trace.json
    PJRT_DEVICE=CPU OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 examples/llama/train.py --device xla

All give the same losses, pipelines to the last bit. ``training.py`` has the training; its comments that start with
"nxdpp" mark the lines that make a pipeline of a Hugging Face model. This file checks the flags before anything imports
torch.
"""

import gc
import signal
import sys

import first_ctrl_c

# New objects between two collections, in place of some hundred.
COLLECTED_AFTER = 100_000


def main(arguments: list[str]) -> None:
    """Run with command-line ``arguments``; wrong ones end the process with status 2, Ctrl-C ends it with 130."""
    # Their imports take a part of a second.
    from ctrl_c import CtrlC
    from settings import read_settings, refuse

    ctrl_c = CtrlC()
    with ctrl_c.heard():
        try:
            settings = read_settings(arguments)
            # The import of torch takes seconds.
            from training import prepare, run

            prepare(settings)
        except ValueError as error:
            refuse(error)
        ctrl_c.defer()
        status = run(settings, ctrl_c)
    if status:
        sys.exit(status)


if __name__ == "__main__":
    first_ctrl_c.hear()
    # torch and transformers make a million objects that stay. Python's collector would look at them again and again.
    gc.set_threshold(COLLECTED_AFTER)
    try:
        main(sys.argv[1:])
    finally:
        # Nor does it have to look at them at the exit: all files are closed.
        gc.freeze()
        # From here on a Ctrl-C has nothing to tell.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
