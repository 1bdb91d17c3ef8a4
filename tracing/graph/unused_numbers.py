"""Numbers that the spine takes from tensors without computing with them: ``self.history.append(loss.item())``."""

import logging
from collections.abc import Collection
from functools import cache

from torch import fx

from nxdpp.tracing.graph.errors import model_line

_logger = logging.getLogger(__name__)

_NUMBERS = ("item", "tolist")
_LIBRARY = "/site-packages/"


def warn_of_unused_numbers(graph: fx.Graph, asked: Collection[fx.Node]) -> None:
    """Log a warning, once for each line, for a number of ``graph`` that no node uses: a log would lose it.

    ``asked`` are nodes whose value the trace has told the code.
    """
    for node in graph.nodes:
        is_number = node.op == "call_method" and node.target in _NUMBERS
        if is_number and not node.users and node not in asked:
            line = model_line(node.stack_trace)
            if _LIBRARY not in line:
                _warn_once(line)


@cache
def _warn_once(line: str) -> None:
    _logger.warning(
        "forward takes a number of a tensor and does not compute with it: this line runs when a graph is traced, not "
        "in each step\n  at %s\nFor a log take the loss that run_train returns, or a module of its own that returns "
        "its argument (loss = self.log(loss)): it runs for each microbatch on the stage of the value",
        line,
    )
