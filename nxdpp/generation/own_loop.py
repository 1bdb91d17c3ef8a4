"""``generate`` that a model's class has written itself, such as nanoGPT's: its loop runs on every rank.

::

    def generate(self, idx, max_new_tokens, ...):      the code of the model, with the same random numbers on all ranks
        for _ in range(max_new_tokens):
            logits, _ = self(idx)                      an evaluation, whose output all ranks get
            ...
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from nxdpp.generation.checks import check_dropout
from nxdpp.generation.driven_model import second_object
from nxdpp.pipeline.model import NxDPPModel
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.board import board


def generate_by_own_loop(
    model: NxDPPModel[bool, bool], positional: Sequence[Any], num_microbatches: int, arguments: Mapping[str, Any]
) -> Any:
    """Return what the model's own ``generate`` returns; collective over the ranks of the pipeline.

    Raises ``ValueError`` for ``num_microbatches``, and for dropout in training mode. ``RuntimeError`` for a loop that
    calls a module of another rank, or that gives labels to the forward.
    """
    root: Any = model.original_module
    if num_microbatches != 1:
        raise ValueError(
            f"the generate of {type(root).__name__} takes one batch: leave out num_microbatches={num_microbatches}."
        )
    if model.stages == 1:
        with model.part.whole_parameters():
            return root.generate(*positional, **arguments)
    check_dropout(root)
    failure_watch.refuse_after_failure()
    model.part.check_materialised()
    signature = inspect.signature(root.forward)

    def forward(*values: Any, **named: Any) -> Any:
        losses, output = model.steps.evaluate(_by_name(signature, values, named), everywhere=True)
        if losses is not None:
            raise RuntimeError(
                f"the generate of {type(root).__name__} calls a forward that returns a loss, and needs the model's "
                f"output: call it without labels there, or generate with run_eval(..., everywhere=True)."
            )
        return output

    methods = {"__call__": staticmethod(forward), "forward": staticmethod(forward)}
    with board.call("generate", "call", "pipeline", has_limit=True):
        return second_object(root, (type(root),), methods).generate(*positional, **arguments)


def named_arguments(module: nn.Module, positional: Sequence[Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``module.generate`` by name; ``positional`` are those after the inputs.

    Raises ``TypeError`` as a call would.
    """
    generate: Any = module.generate
    signature = inspect.signature(generate)
    inputs = next(iter(signature.parameters))
    return {
        name: value for name, value in _by_name(signature, [None, *positional], arguments).items() if name != inputs
    }


def _by_name(signature: inspect.Signature, positional: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name. Raises ``TypeError`` as the call would."""
    found = dict(signature.bind(*positional, **named).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            found |= found.pop(parameter.name, {})
    return found
