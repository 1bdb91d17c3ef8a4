"""Exact equality of a model trained in stages and the same model trained whole."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nxdpp.pipeline.config import PipelineConfig
from nxdpp.pipeline.microbatches.rows import split_inputs
from nxdpp.pipeline.partition.partition import GivenCuts
from nxdpp.pipeline.stages.loss import pick_loss
from nxdpp.tracing.values.input_dicts import close_inputs, open_inputs
from tests.support.in_process import InProcessPipeline


def assert_exact(
    model: nn.Module,
    inputs: Mapping[str, Any],
    layer_class: Any = None,
    stages: int = 2,
    microbatches: int = 2,
    cuts: Sequence[str] | None = None,
) -> InProcessPipeline:
    """Assert that losses and gradients are equal to the last bit, in training and in evaluation mode.

    The first trace gets the first microbatch. ``cuts`` are ``pipeline_cuts``, in place of ``stages``. Returns the
    pipeline.
    """
    whole = copy.deepcopy(model)
    parts = [close_inputs(part) for part in split_inputs(open_inputs(inputs), microbatches)]
    if cuts is None:
        pipeline = InProcessPipeline(model, stages, parts[0], transformer_layer_cls=layer_class)
    else:
        config = PipelineConfig(model, layer_class, pipeline_cuts=cuts)
        options = config.tracing_options()
        pipeline = InProcessPipeline(model, len(cuts) + 1, parts[0], options, policy=GivenCuts(cuts))
    for training in (True, False):
        model.train(training).zero_grad()
        whole.train(training).zero_grad()
        torch.manual_seed(0)
        ours = pipeline.train(inputs, microbatches)
        torch.manual_seed(0)
        theirs = []
        for part in parts:
            loss = pick_loss(whole(**part), None)
            (loss / microbatches).backward()
            theirs.append(loss.detach())
        assert torch.equal(torch.stack(ours).detach(), torch.stack(theirs))
        expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
        assert any(gradient is not None for gradient in expected.values())
        for name, parameter in model.named_parameters():
            theirs_of = expected[name]
            if parameter.grad is None or theirs_of is None:
                assert parameter.grad is theirs_of, name
            else:
                assert torch.equal(parameter.grad, theirs_of), name
    return pipeline
