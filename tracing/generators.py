"""The global random generators of Python and NumPy, as before after a run of code that may draw from them."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy


@contextmanager
def unchanged_generators() -> Iterator[None]:
    """Restore the state of both generators afterwards. Fake tensors draw from none of torch's."""
    of_python, of_numpy = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)
