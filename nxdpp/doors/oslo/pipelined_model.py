"""A model of ``initialize`` over a pipeline: its call runs all stages."""

import functools
import inspect
from typing import Any, NoReturn

import torch
from transformers import PreTrainedModel

from nxdpp.doors.oslo.pipelined_call import PipelinedCall
from nxdpp.doors.oslo.shadow import Shadow
from nxdpp.ground.torch_names import REPLICATED_BY_TORCH
from nxdpp.pipeline.config import PipelineConfig
from nxdpp.pipeline.pipeline import Pipeline
from nxdpp.ranks import parallel_state


def pipeline(model: PreTrainedModel, num_microbatches: int) -> Pipeline:
    """Cut ``model`` into stages, and free what is not this rank's; its calls then run the pipeline.

    Returns the pipeline, which trains a shadow of the model. Raises as ``Pipeline`` does, before ``model`` is changed.
    """
    shadow = Shadow(model)
    made = Pipeline(shadow.module, PipelineConfig(num_microbatches=num_microbatches))
    shadow.keep(made.local_module)
    # Read by the constructor of DistributedDataParallel.
    vars(model)[REPLICATED_BY_TORCH.name] = shadow.freed_names()
    vars(model)["gradient_checkpointing_enable"] = _gradient_checkpointing_enable
    vars(model)["pipelined_call"] = PipelinedCall(shadow, made)
    return made


def methods_for(own: type[PreTrainedModel]) -> dict[str, Any]:
    """Return the methods of a pipelined model whose class was ``own``."""
    signature = inspect.signature(own.forward)

    @functools.wraps(own.forward)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(self, *args, **kwargs).arguments
        inputs = {name: value for name, value in list(arguments.items())[1:] if value is not None}
        for name, parameter in signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                inputs.update(inputs.pop(name, {}))
        if torch.is_grad_enabled() and "labels" in signature.parameters and "labels" not in inputs:
            raise ValueError(
                "a pipelined model with gradients runs forward and backward of its own loss: give labels=, or call it "
                "under torch.no_grad()"
            )
        if "use_cache" in signature.parameters:
            # Each rank would have a part of the cache.
            inputs.setdefault("use_cache", False)
        return vars(self)["pipelined_call"](inputs)

    return {"forward": forward, "generate": _generate, "device": property(_device)}


def _device(self: PreTrainedModel) -> torch.device:
    """This rank's device. The first parameter of the model may be on another rank."""
    return parallel_state.local_device()


def _generate(self: PreTrainedModel, inputs: Any = None, **arguments: Any) -> Any:
    """Generate tokens as transformers' ``generate`` over all stages; collective over the pipeline."""
    return vars(self)["pipelined_call"].generate(inputs, arguments)


def _gradient_checkpointing_enable(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        'gradient_checkpointing_enable would not reach the stages: give {"activation_checkpointing": {"enable": True}} '
        "to oslo.initialize"
    )
