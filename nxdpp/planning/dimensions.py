"""A model that a tensor group divides, in one process."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from nxdpp.planning.layout import Dimensions
from nxdpp.ranks import parallel_state


@contextmanager
def divided(model: nn.Module, sizes: Dimensions, plan: Mapping[str, str] | None = None) -> Iterator[None]:
    """Divide ``model`` over the tensor group of ``sizes``, and act as its first rank meanwhile; no process is needed.

    ``tensor_parallelize`` divides it, by its ``plan`` if one is given. Raises ``ValueError`` for a model that
    it refuses.
    """
    if sizes.tensor == 1:
        yield
        return
    from nxdpp.tensor.models.parallelize import tensor_parallelize

    parallel_state.initialize_debug(tensor_model_parallel_size=sizes.tensor)
    try:
        with warnings.catch_warnings():
            if plan is not None:
                warnings.simplefilter("ignore")  # the run of the plan compares it
            tensor_parallelize(model, plan, sequence_parallel=sizes.sequence)
        yield
    finally:
        parallel_state.destroy_model_parallel()
