"""``generate`` of a pipelined model: transformers' own on one rank, whose forwards run on all ranks of the pipeline.

::

    driver            generate: processors, criteria, sampling, beams        one rank of the last stage
       │ command      inputs of the forward, changes of the caches
       ▼
    all ranks         the model's forward; hidden states go from stage to stage, logits stay on the driver
       ▼
    driver            next token                                             at the end all ranks get the tokens
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from nxdpp.generation.batches import batches_of, joined, plain_settings
from nxdpp.generation.checks import check_arguments, check_same, generating_path, is_generating
from nxdpp.generation.driver import GenerationDriver
from nxdpp.generation.generating_rank import GeneratingRank
from nxdpp.generation.known_calls import Plans
from nxdpp.generation.messages import RankMessages
from nxdpp.generation.own_loop import generate_by_own_loop, named_arguments
from nxdpp.ground.transformers_names import CACHE_LENGTH
from nxdpp.pipeline.model import NxDPPModel
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.board import board


@dataclass
class _Kept:
    """State of a model between generations: its messages, and plans by the dtypes of parameters and autocast."""

    messages: RankMessages
    plans: dict[str, Plans] = field(default_factory=dict)


_kept: "WeakKeyDictionary[NxDPPModel[bool, bool], _Kept]" = WeakKeyDictionary()


def generate(
    model: NxDPPModel[bool, bool], positional: Sequence[Any], num_microbatches: int, arguments: Mapping[str, Any]
) -> Any:
    """Generate as ``NxDPPModel.generate``; collective over the pipeline and its tensor groups."""
    parallel_state.refuse_in_debug("generate")
    root: Any = model.original_module
    if hasattr(root, "generate") and not is_generating(root):
        return generate_by_own_loop(model, positional, num_microbatches, arguments)
    path = generating_path(root)
    module = root.get_submodule(path)
    arguments = dict(arguments)
    inputs, *others = positional or (arguments.pop("inputs", None),)
    arguments = plain_settings(named_arguments(module, others, arguments) if others else arguments)
    check_arguments(module, inputs, num_microbatches, arguments)
    failure_watch.refuse_after_failure()
    model.part.check_materialised()
    with board.call("generate", "call", "pipeline", has_limit=True), model.part.whole_parameters(), _no_traces(module):
        device, steps = model.part.device, model.steps
        batches = batches_of(module, inputs, num_microbatches, arguments, device)
        kept = _kept.get(model) or _kept.setdefault(model, _Kept(RankMessages(device, steps.last_rank)))
        messages = kept.messages
        agreed = check_same(batches, arguments, root, device)
        plans = kept.plans.setdefault(agreed.dtypes, {})
        places, count = (steps.partition, steps.schedule.placement), len(batches)
        rank = GeneratingRank(root, path, *places, messages, device, count, plans, _has_divided_logits(module))
        if messages.is_driver:
            results = GenerationDriver(rank, arguments, agreed.has_streamer).generate(batches)
        else:
            results = rank.follow(arguments.get("streamer"), agreed.has_equal_random_state)
        return joined(results, module, inputs, num_microbatches, arguments)


@contextmanager
def _no_traces(module: nn.Module) -> Iterator[None]:
    """Run without gradients, also in the caller's inference mode, and leave ``module`` as it was."""
    before = vars(module).get(CACHE_LENGTH.name)
    try:
        with torch.inference_mode(mode=False), torch.no_grad():
            yield
    finally:
        vars(module).pop(CACHE_LENGTH.name, None)
        if before is not None:
            vars(module)[CACHE_LENGTH.name] = before


def _has_divided_logits(module: nn.Module) -> bool:
    if parallel_state.get_tensor_model_parallel_size() == 1:
        return False
    head = module.get_output_embeddings()  # type: ignore[operator]  # of a transformers model
    return getattr(head, "gather_output", True) is False
