"""Settings of the interpreters that tests start: Python's collector leaves the objects of imported modules alone.

torch and transformers make a million of them. Collections in an import, and at the exit, take 2 s of processor time.
"""

import atexit
import gc

gc.set_threshold(100_000)
# The first function that is registered is the last one that runs.
atexit.register(gc.freeze)
