"""``torch.cuda`` has one place: ``devices/cuda.py``."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "benchmarks", "checkpoint", "devices", "examples", "initialization", "parallel_layers", "pipeline", "schedules",
    "tracing", "nxdpp/utils",
)  # fmt: skip


def _places(source: str) -> Iterator[int]:
    """Lines that name ``torch.cuda``, import it, or fetch it by a string."""
    for node in ast.walk(ast.parse(source)) if "cuda" in source or "get_device_module" in source else ():
        match node:
            case ast.Attribute(value=ast.Name("torch"), attr="cuda"):
                yield node.lineno
            case ast.ImportFrom(module=str(module)) if (module + ".").startswith("torch.cuda."):
                yield node.lineno
            case ast.ImportFrom(module="torch", names=names) if any(name.name == "cuda" for name in names):
                yield node.lineno
            case ast.Import(names=names) if any((name.name + ".").startswith("torch.cuda.") for name in names):
                yield node.lineno
            case ast.Call(func=ast.Name("getattr"), args=[ast.Name("torch"), ast.Constant("cuda"), *_]):
                yield node.lineno
            case ast.Attribute(value=ast.Name("torch"), attr="get_device_module"):
                yield node.lineno


def test_torch_cuda_is_named_in_one_file() -> None:
    found = {
        str(path.relative_to(ROOT)): list(_places(path.read_text()))
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    assert [path for path, lines in found.items() if lines] == ["devices/cuda.py"], found


def test_each_way_to_name_it_is_found() -> None:
    source = """
import torch.cuda
from torch import cuda
from torch.cuda import Event
torch.cuda.synchronize()
getattr(torch, "cuda")
torch.get_device_module("cuda")
torch.device("cuda")
torch.backends.cuda.is_built()
"""
    assert sorted(_places(source)) == [2, 3, 4, 5, 6, 7]
