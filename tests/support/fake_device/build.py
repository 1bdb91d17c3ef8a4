"""Build of the fake accelerator: once for each torch, Python and state of the sources, into the user's cache."""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

NAME = "fake_device_c"
SOURCES = Path(__file__).parent / "csrc"


def compiler() -> str | None:
    """Path of a compiler of C++, or ``None``."""
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")


def why_not() -> str | None:
    """Return why the fake accelerator cannot be built here, or ``None``."""
    if sys.platform != "linux":
        return f"the fake accelerator needs Linux, and this is {sys.platform}"
    if compiler() is None and not _library().exists():
        return "the fake accelerator needs a compiler of C++, and none is here"
    return None


def built() -> Path:
    """Return the library; build it first if no other process has.

    A process that has loaded it is of no use to forks: autograd has threads for the device from its first backward on.

    Raises ``RuntimeError`` with the compiler's output where it fails.
    """
    library = _library()
    if not library.exists():
        with _lock(library.parent):
            if not library.exists():
                _build(library)
    return library


def load() -> ModuleType:
    """Return the library as a module of Python; raises as ``built`` does."""
    library = built()
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _library() -> Path:
    digest = hashlib.sha256(" ".join(_flags()).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return _folder() / f"{digest.hexdigest()[:16]}" / f"{NAME}.so"


def _folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    try:
        base.mkdir(parents=True, exist_ok=True)
        writable = os.access(base, os.W_OK)
    except OSError:
        writable = False
    return (base if writable else Path(tempfile.gettempdir())) / "nxdpp-fake-device"


def _flags() -> list[str]:
    package = Path(torch.__file__).parent
    includes = [package / "include", package / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    defines = [
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        "-DAT_PER_OPERATOR_HEADERS",
        "-DUSE_DISTRIBUTED",
    ]
    for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI"):
        value = getattr(torch._C, f"_PYBIND11_{name}", None)
        if value is not None:
            defines.append(f'-DPYBIND11_{name}="{value}"')
    return [
        "-std=c++20",
        "-O1",
        "-fPIC",
        "-fvisibility=hidden",
        "-w",
        f"-DTORCH_VERSION_OF_BUILD={torch.__version__.replace('+', '_')}",
        *defines,
        *(f"-isystem{folder}" for folder in includes),
    ]


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(library: Path) -> None:
    flags = _flags()
    objects = _folder() / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    header = (SOURCES / "fake.h").read_bytes()

    def compiled(source: Path) -> Path:
        digest = hashlib.sha256(" ".join(flags).encode() + header + source.read_bytes()).hexdigest()[:16]
        made = objects / f"{source.stem}-{digest}.o"
        if not made.exists():
            unfinished = made.with_suffix(f".{os.getpid()}")
            _run([*flags, "-c", str(source), "-o", str(unfinished)])
            unfinished.replace(made)
        return made

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        made = list(pool.map(compiled, sorted(SOURCES.glob("*.cpp"), key=lambda path: -path.stat().st_size)))
    libraries = Path(torch.__file__).parent / "lib"
    unfinished = library.with_suffix(".unfinished")
    links = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    _run(["-shared", *map(str, made), *links, "-o", str(unfinished)])
    unfinished.replace(library)


def _run(arguments: list[str]) -> None:
    found = compiler()
    assert found is not None, why_not()
    command = [found, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"the fake accelerator does not build: {' '.join(command)}\n{result.stderr[-8000:]}")
