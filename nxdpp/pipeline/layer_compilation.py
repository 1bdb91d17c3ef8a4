"""``torch.compile`` of this rank's modules, after the model is cut.

Dynamo keeps compiled codes at the ``forward`` of a class, and compares the module and its inputs with what each code
was compiled for::

    LlamaDecoderLayer.forward     training, static shapes        all equal layers run it
                                  training, dynamic shapes       compiled at the second shape
                                  evaluation, dynamic shapes
"""

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from nxdpp.devices.kinds import device_of
from nxdpp.gradients.expert_parameters import is_of_experts
from nxdpp.ground.torch_names import DYNAMO_CONFIG, EFFECT, INDUCTOR_CONFIG, INDUCTOR_MODE, KEEP_ORDER
from nxdpp.pipeline.activation_checkpoint import compile_checkpointed
from nxdpp.pipeline.local.view import LocalView
from nxdpp.ranks import parallel_state
from nxdpp.tracing.modules import listings

# Torch's own limit is 8 codes of a class; it then runs modules as they are. Layers that read their number need codes of
# their own: static and dynamic shapes in training and evaluation.
_CODES = 64
_CODES_OF_A_MODULE = 4
_KEY = "triton.cudagraphs"
_GRAPHS = (
    "replays CUDA graphs, whose outputs the next microbatch overwrites while earlier ones are in flight. Turn it off; "
    "mode='max-autotune-no-cudagraphs' is without it."
)
_TIMED = ("max_autotune", "max_autotune_pointwise", "max_autotune_gemm", "coordinate_descent_tuning")


def apply_compile(model: nn.Module, **options: Any) -> None:
    """Compile this rank's layers, embeddings, norms and heads with ``torch.compile``; their first calls compile.

    Equal layers run one compiled code. A second shape of inputs compiles once more, for dynamic shapes; further shapes
    run that code. Training, evaluation and other dtypes have their own codes. Modules are compiled in place: names of
    parameters, state dicts and checkpoints stay. Losses and gradients equal, bit for bit, those of one process whose
    same modules are compiled with the same ``options``, and to rounding with tensor parallelism. With
    ``apply_checkpoint``, called before or after, a recomputation runs the compiled forward again.

    The backward of a compiled module is one operation. So a schedule that splits backwards (``zb1p``, ``zb-v`` and
    others) trains exactly, and computes the module's weight-gradients already with its input-gradient: it then has the
    bubble of the schedule without a split. ``backend="eager"`` keeps the split.

    Tensor-parallel layers are compiled with their collectives, which run in the order of the layer's code. The sum of
    an input-gradient then does not overlap with the weight-gradient, as it does in layers that are not compiled.

    While a rank compiles, others wait up to ``compile_timeout`` of ``initialize_model_parallel``. Modules without
    parameters, modules of which the model calls a method other than ``forward``, and what it computes between modules
    are not compiled; before torch 2.14 neither is a plain ``nn.Linear`` or ``nn.Embedding``. A second call replaces the
    options. A module that replaces another later is not compiled until the next call. A change of a layer's hooks
    compiles it again. A copy of a module is not compiled. Not collective; every rank calls it, with equal options.

    Settings of the process in ``torch._dynamo.config`` change: limits of codes rise, for layers that read their own
    number, and ``skip_nnmodule_hook_guards`` becomes ``False``.

    Args:
        model: the wrapped model, with or without values, or the model of ``initialize_parallel_model``.
        options: arguments of ``torch.compile`` other than ``model``, such as ``backend``, ``mode`` and ``dynamic``.

    Raises:
        TypeError: for a ``model`` that is not wrapped, or a part of one.
        ValueError: for options that torch refuses, for CUDA graphs, for ``mode`` and ``options`` of a named backend
            other than inductor, on XLA devices, for experts that ``expert_parallelize`` has divided, and with tensor
            parallelism for modes that choose kernels by their times such as ``max-autotune``. Nothing is changed then.
    """
    wrapped = model if isinstance(model, LocalView) else getattr(model, "pipelined", None)
    if not isinstance(wrapped, LocalView):
        raise TypeError(
            f"apply_compile takes a wrapped model, not a {type(model).__name__}: call it after NxDPPModel(module, ...) "
            f"with the whole of it, and it compiles the layers, embedding and head of this rank. Another module "
            f"compiles itself, by module.compile()."
        )
    if device_of(parallel_state.local_device()).is_lazy:
        raise ValueError("an XLA device compiles all operations of an action itself: leave apply_compile out.")
    is_divided = parallel_state.get_tensor_model_parallel_size() > 1
    check_options(options, is_divided)
    modules = list(compiled_modules(wrapped.local_named_children()))
    if any(is_of_experts(parameter) for _, module in modules for parameter in module.parameters()):
        raise ValueError(
            "expert_parallelize has divided the experts, whose messages have other sizes in each step, and compiled "
            "layers were not compared: leave apply_compile out."
        )
    if parallel_state.get_context_model_parallel_size() > 1:
        raise ValueError("context_parallelize was not compared with compiled layers: leave apply_compile out.")
    if is_divided:
        # Not imported before: it imports transformers.
        from nxdpp.tensor.models.shared_inputs import forget_after_calls

        # Compiled collectives in another order would pair other messages.
        for name in (KEEP_ORDER, EFFECT):
            assert name.found
        for _, module in modules:
            forget_after_calls(module)
    compile_modules(modules, options)


def compiled_modules(outermost: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """The modules with parameters among ``outermost`` that have a ``forward``, or below modules that have none."""
    for name, module in outermost:
        if type(module).forward is nn.Module.forward:
            yield from compiled_modules((f"{name}.{key}", child) for key, child in module.named_children())
        elif next(listings.parameters(module), None) is not None:
            yield name, module


def compile_modules(modules: Iterable[tuple[str, nn.Module]], options: dict[str, Any]) -> None:
    """Compile each of the named ``modules`` in place by ``torch.compile``'s ``options``; their first calls compile."""
    # Not imported before: it takes a second.
    config = DYNAMO_CONFIG.found
    named = list(modules)
    codes = _CODES_OF_A_MODULE * len(named)
    config.recompile_limit = max(config.recompile_limit, _CODES, codes)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, codes)
    # Else hooks that are registered or removed after the first call would change nothing.
    config.skip_nnmodule_hook_guards = False
    for name, module in named:
        compile_checkpointed(name, module, _copied(options))


def check_options(options: dict[str, Any], is_divided: bool = False) -> None:
    """Raise ``ValueError`` for ``options`` that ``torch.compile``, a pipeline or a divided model refuses."""
    config = INDUCTOR_CONFIG.found
    known = [name for name in inspect.signature(torch.compile).parameters if name != "model"]
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(f"torch.compile of torch {torch.__version__} has no {unknown}; it takes {', '.join(known)}.")
    backend, mode, inner = (options.get(name) for name in ("backend", "mode", "options"))
    if backend == "cudagraphs":
        raise ValueError(f"backend='cudagraphs' {_GRAPHS}")
    if isinstance(backend, str) and backend != "inductor" and (mode or inner):
        raise ValueError(f"mode and options are inductor's: leave them out with backend={backend!r}.")
    try:
        torch.compile(check_options, **_copied(options))
    except Exception as error:
        raise ValueError(f"torch.compile refuses {options}: {error!s:.300}") from error
    if backend in (None, "inductor"):
        named = INDUCTOR_MODE(mode) if mode else inner or {}
        given = {name.replace("-", "_"): value for name, value in named.items()}
        if given.get(_KEY, config.triton.cudagraphs):
            what = f"torch._inductor.config.{_KEY}" if _KEY not in given else f"mode={mode!r}" if mode else _KEY
            raise ValueError(f"{what} {_GRAPHS}")
        if is_divided and (timed := [name for name in _TIMED if given.get(name, getattr(config, name))]):
            raise ValueError(
                f"{timed[0]} chooses kernels by their times, on each tensor-parallel rank by itself: the ranks' copies "
                f"of one value would differ. Leave it out, or use a tensor-parallel size of 1."
            )


def _copied(options: dict[str, Any]) -> dict[str, Any]:
    """``options`` for one call: torch takes entries out of the inner dict."""
    inner = options.get("options")
    return options | {"options": dict(inner)} if inner is not None else options
