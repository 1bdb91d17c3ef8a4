"""Each kind of device has one place.

``torch.cuda`` and the type ``"cuda"`` are named in ``devices/cuda.py``, the modules of other types are asked for in
``devices/accelerator.py``, and ``torch_xla`` is named in ``devices/xla.py``. Events, pinned memory and copies without a
wait are in ``devices/``, and no code asks for the type of an XLA device.
"""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "examples", "nxdpp")


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


def _types(source: str) -> Iterator[int]:
    """Lines with the text ``"cuda"``."""
    for node in ast.walk(ast.parse(source)) if "cuda" in source else ():
        if isinstance(node, ast.Constant) and node.value == "cuda":
            yield node.lineno


_WORDS = ("torch.Event", "torch.Stream", "torch.accelerator", "pin_memory", "record_stream", "non_blocking")


def _asynchronous(source: str) -> Iterator[int]:
    """Lines with an event, a stream, pinned memory, or a copy that does not wait."""
    for node in ast.walk(ast.parse(source)) if any(word in source for word in _WORDS) else ():
        match node:
            case ast.Attribute(value=ast.Name("torch"), attr="Event" | "Stream"):
                yield node.lineno
            case ast.Attribute(value=ast.Attribute(value=ast.Name("torch"), attr="accelerator"), attr=attribute):
                if "stream" in attribute or attribute == "synchronize":
                    yield node.lineno
            case ast.Call(func=ast.Attribute(attr="pin_memory" | "record_stream")):
                yield node.lineno
            case ast.keyword(arg="pin_memory" | "non_blocking"):
                yield node.lineno


def _xla_places(source: str) -> Iterator[int]:
    """Lines that import ``torch_xla``, or compare a device type with ``"xla"``."""
    for node in ast.walk(ast.parse(source)) if "xla" in source else ():
        match node:
            case ast.ImportFrom(module=str(name)) if _is_torch_xla(name):
                yield node.lineno
            case ast.Import(names=names) if any(_is_torch_xla(name.name) for name in names):
                yield node.lineno
            case ast.Call(func=function, args=[ast.Constant(str(name)), *_]) if _is_torch_xla(name):
                if ast.unparse(function).rpartition(".")[2] in ("import_module", "__import__"):
                    yield node.lineno
            case ast.Compare() if ".type" in ast.unparse(node) and "'xla'" in ast.unparse(node):
                yield node.lineno


def _is_torch_xla(module: str) -> bool:
    return (module + ".").startswith("torch_xla.")


def _files_with(places: Callable[[str], Iterator[int]]) -> list[str]:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [path.relative_to(ROOT).as_posix() for path in paths if list(places(path.read_text()))]
    # nnScaler's door imports public names only, and devices are none. The first hour looks at the device itself.
    return [path for path in found if not path.startswith(("nxdpp/doors/nnscaler/", "benchmarks/first_hour/"))]


def test_torch_cuda_is_named_in_one_file() -> None:
    assert _files_with(_places) == ["nxdpp/devices/accelerator.py", "nxdpp/devices/cuda.py"]


def test_the_type_is_named_in_one_folder() -> None:
    # Names of methods of tensors, of strategies of nnScaler, and where a door has public names alone.
    names = {
        "nxdpp/doors/nnscaler/compute_config.py", "nxdpp/doors/oslo/parallel_model.py",
        "nxdpp/tracing/sizes/input_specs.py", "nxdpp/tracing/models/loss_terms.py",
        "nxdpp/tracing/values/lost_changes.py", "nxdpp/tracing/values/metadata.py",
    }  # fmt: skip
    found = [path for path in _files_with(_types) if not path.startswith(("benchmarks/", "examples/"))]
    assert set(found) - names == {
        "nxdpp/devices/__init__.py",
        "nxdpp/devices/accelerator.py",
        "nxdpp/devices/autocast.py",
    }


def test_events_and_copies_without_a_wait_are_in_one_folder() -> None:
    assert _files_with(_asynchronous) == ["nxdpp/devices/accelerator.py"]


def test_torch_xla_is_named_in_one_file() -> None:
    assert _files_with(_xla_places) == ["nxdpp/devices/xla.py"]
