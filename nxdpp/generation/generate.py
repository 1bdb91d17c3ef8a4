"""``generate`` of a pipelined model: transformers' own on one rank, whose forwards run on all ranks of the pipeline.

::

    driver            generate: processors, criteria, sampling, beams        one rank of the last stage
       │ command      inputs of the forward, changes of the caches
       ▼
    all ranks         the model's forward; hidden states go from stage to stage, logits stay on the driver
       ▼
    driver            next token                                             at the end all ranks get the tokens
"""

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from nxdpp.generation.batches import batches_of, joined
from nxdpp.generation.checks import check_arguments, check_same, generating_path
from nxdpp.generation.driver import GenerationDriver
from nxdpp.generation.generating_rank import GeneratingRank
from nxdpp.generation.known_calls import Plans
from nxdpp.generation.messages import RankMessages
from nxdpp.pipeline.pipeline import Pipeline
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.board import board

_plans: "WeakKeyDictionary[Pipeline, Plans]" = WeakKeyDictionary()


def generate(pipeline: Pipeline, inputs: Any, num_microbatches: int, arguments: Mapping[str, Any]) -> Any:
    """Generate as ``NxDPPModel.generate``; collective over the pipeline and its tensor groups."""
    parallel_state.refuse_in_debug("generate")
    path = generating_path(pipeline.original_module)
    module = pipeline.original_module.get_submodule(path)
    check_arguments(module, inputs, num_microbatches, arguments)
    failure_watch.refuse_after_failure()
    pipeline.check_materialised()
    with board.call("generate", "call", "pipeline", has_limit=True), torch.no_grad():
        device = pipeline.device
        batches = batches_of(module, inputs, num_microbatches, arguments, device)
        last = pipeline.schedule.placement.rank_of(pipeline.partition.stages - 1)
        messages = RankMessages(device, last)
        agreed = check_same(batches, arguments, module.training)
        rank = GeneratingRank(
            pipeline.original_module,
            path,
            pipeline.partition,
            pipeline.schedule.placement,
            messages,
            device,
            len(batches),
            _plans.setdefault(pipeline, {}),
            _has_divided_logits(module),
        )
        if messages.is_driver:
            results = GenerationDriver(rank, arguments, agreed.has_streamer).generate(batches)
        else:
            results = rank.follow(arguments.get("streamer"), agreed.has_equal_random_state)
        return joined(results, module, inputs, num_microbatches, arguments)


def _has_divided_logits(module: nn.Module) -> bool:
    if parallel_state.get_tensor_model_parallel_size() == 1:
        return False
    head = module.get_output_embeddings()  # type: ignore[operator]  # of a transformers model
    return getattr(head, "gather_output", True) is False
