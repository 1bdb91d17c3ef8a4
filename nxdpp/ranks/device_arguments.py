"""The arguments ``backend`` and ``device`` of ``initialize_model_parallel``: checks, and the device that they ask for.

::

    device    None    "cpu"    "cuda"    "xla"
    backend   any     gloo     nccl      gloo
"""

BACKENDS = ("gloo", "nccl")
_BACKEND_OF = {"cpu": "gloo", "cuda": "nccl", "xla": "gloo"}
_DEVICE_OF = {"gloo": "cpu", "nccl": "cuda"}
_DEVICES = "'cpu', 'cuda', for the CUDA device of the local rank, or 'xla', for torch_xla's device of the process"


def wanted_device(backend: str | None, device: str | None) -> str | None:
    """Return ``"cpu"``, ``"cuda"``, ``"xla"``, or ``None`` for CUDA where it is present, and else the CPU.

    Raises ``ValueError`` for an unknown name, and for a backend that does not serve the device.
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(
            f"backend={backend!r:.80} must be 'gloo', for the CPU, or 'nccl', for CUDA devices; without it nxdpp takes "
            f"nccl where each rank has a CUDA device, and else gloo"
        )
    if device is None:
        return None if backend is None else _DEVICE_OF[backend]
    if not isinstance(device, str) or device not in _BACKEND_OF:
        raise ValueError(f"device={device!r:.80} must be {_DEVICES}; without it nxdpp takes the device of the backend")
    if backend not in (None, _BACKEND_OF[device]):
        raise ValueError(
            f"backend={backend!r} does not serve device={device!r}, which communicates over {_BACKEND_OF[device]}: "
            f"leave backend out, or give backend={_BACKEND_OF[device]!r}"
        )
    return device


def backend_of(device: str) -> str:
    """Return the backend that serves the device of a type, ``"gloo"`` or ``"nccl"``."""
    return _BACKEND_OF[device]


def written(backend: str | None, device: str | None) -> str:
    """Return the argument of the two that asks for the device, as a caller writes it."""
    return f"backend={backend!r}" if device is None else f"device={device!r}"
