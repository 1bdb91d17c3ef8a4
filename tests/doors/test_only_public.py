"""The doors of nnScaler and OSLO import public names, as in ``__all__`` of ``nxdpp``, and names of agreement."""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]
PUBLIC = ("nxdpp", "nxdpp.optimizer", "nxdpp.parallel_layers")
# Comparisons of ranks, parts of batches and of tensors, ties, options of groups, refusals of a step or a save
# of a part, values that are sent, waits for them, mappings, modules to checkpoint and to compile, master copies, states
# of generators, paths of files, the device of a rank, nouns of numbers and private names of torch have one place each.
SHARED = (
    "nxdpp.doors.local_modules.",
    "nxdpp.doors.random_states.",
    "nxdpp.agreement.",
    "nxdpp.counted.",
    "nxdpp.devices.kinds.",
    "nxdpp.checkpoint.distributed.model_state.",
    "nxdpp.checkpoint.distributed.rectangles.",
    "nxdpp.generation.batches.",
    "nxdpp.gradients.optimizer.fp32_adamw.",
    "nxdpp.gradients.optimizer.partial_steps.",
    "nxdpp.gradients.optimizer.zero1_state.",
    "nxdpp.ground.torch_names.",
    "nxdpp.pipeline.layer_compilation.",
    "nxdpp.pipeline.local.own_save.",
    "nxdpp.pipeline.microbatches.rows.",
    "nxdpp.ranks.device_choice.",
    "nxdpp.ranks.faults.waits.",
    "nxdpp.ranks.launch.",
    "nxdpp.ranks.exchange.",
    "nxdpp.ranks.group_values.",
    "nxdpp.schedules.chosen.",
    "nxdpp.tensor.mappings.",
    "nxdpp.tensor.padding.",
    "nxdpp.tensor.rank_files.",
)
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for door in ("nnscaler", "oslo")
    for path in (ROOT / "nxdpp/doors" / door).rglob("*.py")
)


def test_only_public_names_are_imported() -> None:
    found = {name: list(_private((ROOT / name).read_text(), name.split("/")[2])) for name in FILES}
    assert len(found) > 30
    assert not {name: private for name, private in found.items() if private}


def test_a_private_name_is_found() -> None:
    private = "from nxdpp.pipeline.input_names import forward_names"
    assert list(_private(private, "nnscaler")) == ["nxdpp.pipeline.input_names.forward_names"]


def _private(source: str, door: str) -> Iterator[str]:
    """Give each import of nxdpp in ``source`` that is neither of ``door`` itself, nor public, nor shared."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "nxdpp")
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield from (f"{module}.{alias.name}" for alias in node.names if _is_private(module, alias.name, door))


def _is_private(module: str, name: str, door: str) -> bool:
    if module.partition(".")[0] != "nxdpp" or f"{module}.".startswith((f"nxdpp.doors.{door}.", *SHARED)):
        return False
    value = getattr(import_module(module), name)
    packages = [import_module(package) for package in PUBLIC]
    return not any(value is getattr(package, public) for package in packages for public in package.__all__)
