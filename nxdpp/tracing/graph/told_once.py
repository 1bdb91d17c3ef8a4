"""Lines of ``forward`` that a graph does not repeat and that change no number of a step: each is told of once.

They are calls of ``checkpoint`` outside layers, whose activations a stage keeps, and numbers that the spine takes from
tensors without computing with them (``self.history.append(loss.item())``).
"""

import functools
import logging
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from torch import fx
from torch.utils import checkpoint

from nxdpp.tracing.graph.errors import calling_line, model_line
from nxdpp.tracing.graph.swap import in_this_thread, replaced

_logger = logging.getLogger(__name__)
_NUMBERS = ("item", "tolist")
_LIBRARY = "/site-packages/"
_CHECKPOINT = (
    "forward calls checkpoint outside the transformer layers; a stage keeps the activations that it would recompute\n"
    "  at %s\nCall the layers plainly, and nxdpp.apply_checkpoint(model) once after wrapping"
)
_NUMBER = (
    "forward takes a number of a tensor and does not compute with it: this line runs when a graph is traced, not in "
    "each step\n  at %s\nFor a log take the loss that run_train returns, or a module of its own that returns its "
    "argument (loss = self.log(loss)): it runs for each microbatch on the stage of the value"
)


def told_checkpoints(namespaces: Iterable[dict[str, Any]]) -> AbstractContextManager[None]:
    """Log a warning, once for each line, for a call of ``checkpoint`` in the spine; its numbers are the same.

    ``namespaces`` may have the function under names of their own. A layer of transformers gives its own call (a
    ``partial``), which each run of the layer repeats.
    """
    original = checkpoint.checkpoint

    def told(function: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(function, functools.partial):
            _warn_once(_CHECKPOINT, model_line(calling_line()))
        return original(function, *args, **kwargs)

    return replaced([vars(checkpoint), *namespaces], {id(original): in_this_thread(told, original)})


def warn_of_unused_numbers(graph: fx.Graph, asked: Collection[fx.Node]) -> None:
    """Log a warning, once for each line, for a number of ``graph`` that no node uses: a log would lose it.

    ``asked`` are nodes whose value the trace has told the code.
    """
    for node in graph.nodes:
        is_number = node.op == "call_method" and node.target in _NUMBERS
        if is_number and not node.users and node not in asked:
            line = model_line(node.stack_trace)
            if _LIBRARY not in line:
                _warn_once(_NUMBER, line)


@cache
def _warn_once(message: str, line: str) -> None:
    _logger.warning(message, line)
