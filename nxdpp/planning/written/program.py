"""A whole program of a plan: it constructs the model of a configuration, wraps it, and trains it on random inputs."""

from collections.abc import Mapping, Sequence

from nxdpp.counted import counted
from nxdpp.planning.dtypes import dtype_named
from nxdpp.planning.layout import describe
from nxdpp.planning.plan import Plan

_TOKENS = "input_ids"
_GIB = 2**30


def program(plan: Plan, configuration: str) -> str:
    """Return the source of a program for the first layout of ``plan``, of the model of a configuration's path."""
    layout, dtype = plan.layout, plan.parameter_dtype
    imports, names, wrapping = plan.wrapping()
    constructed = f"{plan.model}(config)" + (f".to(torch.{dtype})" if dtype != "float32" else "")
    if plan.is_deferred:
        names = [*names, "deferred_init"]
        size = f"{plan.parameters * dtype_named(dtype).itemsize / _GIB:.3g} GiB"
        construction = [
            f"# The whole model, {size}, is larger than a device: each rank makes only its own part.",
            f"model = deferred_init(lambda: {constructed})",
        ]
    else:
        construction = [f"model = {constructed}"]
    rows = plan.global_batch // layout.data
    return "\n".join(
        [
            f'"""{plan.model} in {plan.dtype} on {counted(plan.devices, "device")}, as nxdpp has planned it.',
            "",
            f"{describe(layout)}.",
            '"""',
            "",
            "import torch",
            f"from transformers import AutoConfig, {plan.model}",
            "",
            f"from nxdpp import {', '.join(sorted(names))}",
            *imports,
            "",
            "# Construction.",
            plan.initialization(),
            f"config = AutoConfig.from_pretrained({configuration!r})",
            "torch.manual_seed(0)  # the same weights on all ranks",
            *construction,
            *wrapping,
            "",
            f"# Loop. A step takes {counted(rows, 'sample')} of each replica: put your data in the place of the random "
            "ones.",
            "replica = parallel_state.get_data_parallel_rank()",
            "for step in range(10):",
            f"    random = torch.Generator().manual_seed(step * {layout.data} + replica)",
            *_inputs(plan.sample, rows, plan.dtype if plan.dtype != "float32" else None),
            *_step(plan.autocast),
            "    optimizer.step()",
            "    optimizer.zero_grad()",
            "    if loss is not None and replica == 0 and parallel_state.get_tensor_model_parallel_rank() == 0:",
            '        print(f"step {step}: loss {float(loss):.4f}")',
            "parallel_state.destroy_model_parallel()",
            "",
        ]
    )


def _inputs(sample: Mapping[str, Sequence[int]], rows: int, dtype: str | None) -> list[str]:
    """Return lines that make random inputs: tokens, classes, and floats of the model's dtype."""
    lines = ["    batch = {"]
    for name, shape in sample.items():
        shaped = f"({', '.join(map(str, (rows, *shape[1:])))}{',' if len(shape) == 1 else ''})"
        if name == _TOKENS or name == "labels":
            most = "config.num_labels" if len(shape) == 1 else "config.get_text_config().vocab_size"
            value = f"torch.randint({most}, {shaped}, generator=random)"
        else:
            value = f"torch.randn({shaped}, generator=random)" + ("" if dtype is None else f".to(torch.{dtype})")
        lines.append(f'        "{name}": {value},')
    return [*lines, "    }"]


def _step(autocast: str | None) -> list[str]:
    if autocast is None:
        return ["    loss = model.run_train(**batch)"]
    return [
        f"    with torch.autocast(parallel_state.local_device().type, torch.{autocast}):",
        "        loss = model.run_train(**batch)",
    ]
