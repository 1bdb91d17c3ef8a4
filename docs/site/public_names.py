"""Public names by subject, in the order of ``docs/api.md`` and of its page on the site."""

from importlib import import_module

_GROUPS = {
    "Models and steps": (
        "NxDPPModel",
        "apply_checkpoint",
        "apply_compile",
        "GradScaler",
        "batches_of_tokens",
        "declare_optimizer",
        "data_parallel_sampler",
        "TracedLayers",
        "trace_layers",
        "device_memory",
        "MetricsFile",
    ),
    "Weights": ("deferred_init", "init_on_device", "load_pretrained", "LoadReport", "save_pretrained"),
    "Checkpoints of a training": (
        "save_checkpoint",
        "load_checkpoint",
        "has_checkpoint",
        "finalize_checkpoint",
        "gather_state_dict",
    ),
    "Tensor parallelism": ("tensor_parallelize", "tensor_plan", "check_tensor_parallel", "compare_tensor_copies"),
    "Plans": ("plan",),
    "NeuronX Distributed's trainer": (
        "neuronx_distributed_config",
        "initialize_parallel_model",
        "initialize_parallel_optimizer",
    ),
}

# Modules whose names are public too, each with its own section.
_MODULES = {
    "Process groups": "nxdpp.parallel_state",
    "Tensor-parallel layers and gradients": "nxdpp.parallel_layers",
    "Optimizers": "nxdpp.optimizer",
    "transformers' Trainer": "nxdpp.integrations",
    "The trainer's model and optimizer": "nxdpp.trainer",
    "nnScaler's names": "nxdpp.nnscaler",
    "OSLO's names": "nxdpp.oslo",
}


def public_names() -> dict[str, list[str]]:
    """Return the full names of each section, each name once.

    Names of ``nxdpp`` that no section has are in a section of their own.
    """
    package = import_module("nxdpp")
    modules = {name: import_module(name) for name in _MODULES.values()}
    own = [name for name in package.__all__ if callable(getattr(package, name))]
    sections = {title: [name for name in names if name in own] for title, names in _GROUPS.items()}
    listed = {name for names in sections.values() for name in names}
    rest = [name for name in own if name not in listed]
    if rest:
        sections["Other names"] = rest
    full = {title: [f"nxdpp.{name}" for name in names] for title, names in sections.items()}
    for title, name in _MODULES.items():
        full[title] = [f"{name}.{one}" for one in modules[name].__all__ if one not in listed | set(rest)]
    return full
