"""Compiled sweep: each type cut in two, its modules compiled with ``aot_eager``, against the compiled unwrapped model.

The layers, and the modules with parameters outside of them, are compiled in place in both models, as ``apply_compile``
does. Verdicts are those of the training sweep, in train mode on the padded shape. A type that torch cannot compile in
one process is not built.
"""

import copy
from typing import Any

import torch
from torch._dynamo import config

from nxdpp.pipeline.layer_compilation import compile_modules, compiled_modules
from nxdpp.pipeline.local.tree import build_local_module
from nxdpp.tracing.graph.trace import TracingOptions
from nxdpp.tracing.modules import listings
from nxdpp.tracing.modules.layers import find_layer_classes
from tools.zoo import ARGUMENTS, build, inputs
from tools.zoo.comparison import compare
from tools.zoo.inputs import PADDED
from tools.zoo.sweep import Verdict
from tools.zoo.with_loss import with_loss

BACKEND = "aot_eager"
TIME_LIMIT = 120.0  # seconds for a type, mostly of dynamo


def judge(task: str, model_type: str) -> Verdict:
    """Compare one type with its unwrapped model, both compiled."""
    bare = build(task, model_type)
    batches = [inputs(task, bare, PADDED)]
    given: dict[str, Any] = ARGUMENTS.get(model_type, {})
    model = with_loss(task, bare)
    whole = copy.deepcopy(model)
    options = TracingOptions(find_layer_classes(model, given.get("transformer_layer_cls")))
    for each in (model, whole):
        compile_outermost(each, options.layers_of(each))
    # A frame that dynamo gives up runs without an error.
    config.fail_on_recompile_limit_hit = True
    return compare(model, whole, batches, (2,), given=given)


def compile_outermost(model: torch.nn.Module, layers: list[str]) -> None:
    """Compile what ``apply_compile`` compiles on all ranks together."""
    names = {name for name, _ in listings.named_parameters(model, remove_duplicate=False)}
    outermost = build_local_module(model, names, layers).named_children()
    compile_modules(compiled_modules(outermost), {"backend": BACKEND})
