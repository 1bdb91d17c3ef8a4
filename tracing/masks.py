"""Masks of several kinds that transformers makes at once, one for each kind of layer.

``create_masks_for_generate`` gives a dictionary of masks or one mask, as the configuration has it. It is traced
through: what it gives is then known for what it is, and each mask is one node.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, update_wrapper
from typing import Any

from transformers import masking_utils

from nxdpp.tracing.opaque import recorded
from nxdpp.tracing.stable_set import StableSet
from nxdpp.tracing.swap import swapped

# The functions to trace through.
SEVERAL_MASKS = frozenset({masking_utils.create_masks_for_generate})
_ONE_MASK = ("create_causal_mask", "create_chunked_causal_mask", "create_sliding_window_causal_mask")


@contextmanager
def recorded_masks() -> Iterator[None]:
    """Have each mask that the functions of ``SEVERAL_MASKS`` make recorded as a node."""
    functions: dict[str, Any] = {name: recorded(getattr(masking_utils, name)) for name in _ONE_MASK}
    by_layer_type = masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
    with ExitStack() as stack:
        stack.enter_context(swapped(by_layer_type, {key: _recorded(value) for key, value in by_layer_type.items()}))
        stack.enter_context(swapped(vars(masking_utils), {**functions, "set": StableSet}))
        yield


def _recorded(functions: Any) -> Any:
    if isinstance(functions, dict):
        return {name: recorded(function) for name, function in functions.items()}
    if isinstance(functions, partial):
        # A node is judged by the module of its function.
        functions = update_wrapper(partial(functions), functions.func)
    return recorded(functions)
