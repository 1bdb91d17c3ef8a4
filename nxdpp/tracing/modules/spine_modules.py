"""The modules of a spine: the ones above the layers, and the helpers whose methods they call."""

from collections.abc import Collection

from torch import nn

from nxdpp.ground.torch_names import BACKWARD_HOOKS, BACKWARD_PRE_HOOKS, COMPILED_CALL


def spine_names(module: nn.Module, layers: list[str], leaf_classes: tuple[type[nn.Module], ...]) -> set[str]:
    """Names of the ancestors of ``layers`` (the root is ``""``).

    Raises ``ValueError`` for an ancestor of one of ``leaf_classes``, and for a compiled one: a cut could not separate
    the layers inside it.
    """
    spine = {""}
    for layer in layers:
        parts = layer.split(".")
        spine.update(".".join(parts[:depth]) for depth in range(1, len(parts)))
    for name in sorted(spine):
        ancestor = module.get_submodule(name)
        if isinstance(ancestor, leaf_classes):
            raise ValueError(
                f"leaf_module_cls names {type(ancestor).__name__}, but {name or 'the model'} of that class holds "
                f"transformer layers; a leaf cannot be cut. Leave it out of leaf_module_cls."
            )
        if hasattr(ancestor, "get_compiler_config"):
            raise ValueError(
                f"torch.compile was given {name or 'the model'}, which holds transformer layers; it cannot be cut. "
                f"Wrap the module that it was given (._orig_mod), and compile its layers afterwards: "
                f"nxdpp.apply_compile(wrapped)."
            )
        if COMPILED_CALL.of(ancestor) is not None:
            raise ValueError(
                f"{name or 'the model'} was compiled in place (compile()) and holds transformer layers; it cannot be "
                f"cut. Leave this call out, and compile its layers after wrapping: nxdpp.apply_compile(wrapped)."
            )
    return spine


def refuse_backward_hooks(module: nn.Module, spine: Collection[str]) -> None:
    """Raise ``ValueError`` for a backward hook of one of the modules named ``spine``, which no stage runs as a whole.

    Their forward hooks run while they are traced, and what these compute is part of the graph.
    """
    for name in sorted(spine):
        above = module.get_submodule(name)
        if BACKWARD_HOOKS.of(above) or BACKWARD_PRE_HOOKS.of(above):
            raise ValueError(
                f"{name or 'the model'}, a {type(above).__name__}, has a backward hook, and holds transformer layers; "
                f"no stage runs it as a whole. Register the hook on layers or on modules beside them, or remove it."
            )


def without_forward(model: nn.Module, spine: set[str]) -> list[nn.Module]:
    """Modules next to the layers that never run: the spine calls their methods, which are traced through (Funnel)."""
    children = (child for name in sorted(spine) for child in model.get_submodule(name).children())
    return [
        child
        for child in children
        if type(child).forward is nn.Module.forward and not isinstance(child, nn.ModuleList | nn.ModuleDict)
    ]
