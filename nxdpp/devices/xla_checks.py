"""Reasons why XLA's device of this process cannot start, with what to do."""

import os
from importlib.metadata import PackageNotFoundError, version

import torch

INSTALL = (
    "Install nxdpp in a virtual environment of its own with pip install '.[xla]' -c constraints-xla.txt, which takes "
    "the torch that torch_xla fits; or give device='cpu'."
)

# Each gives a process some chips of a TPU. The second one is the older name.
_CHIPS = ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES")


def import_problem(error: ImportError) -> str:
    """Return the reason why torch_xla cannot be imported."""
    if isinstance(error, ModuleNotFoundError) and error.name == "torch_xla":
        return "torch_xla is not installed"
    try:
        found = version("torch_xla")
    except PackageNotFoundError:
        found = "of an unknown version"
    reason = str(error).strip().partition("\n")[0].rstrip(".")
    return f"torch_xla {found} cannot be imported beside torch {torch.__version__}: {reason}"


def check_own_chip(device_type: str, local_world_size: int | None) -> None:
    """Raise ``RuntimeError`` for several processes of a host that would each take all chips of a TPU."""
    if device_type == "TPU" and (local_world_size or 1) > 1 and not any(os.environ.get(name) for name in _CHIPS):
        raise RuntimeError(
            f"device='xla': {local_world_size} local ranks would each take all TPU chips of the host. Give each a chip "
            f"before it starts: TPU_VISIBLE_CHIPS=$LOCAL_RANK TPU_CHIPS_PER_PROCESS_BOUNDS=1,1,1 "
            f"TPU_PROCESS_BOUNDS=1,1,1, as docs/xla.md shows."
        )


def check_backward(device: torch.device) -> None:
    """Raise ``RuntimeError`` if autograd cannot use ``device``; records two operations, and compiles none.

    The first backward of a process starts autograd's threads for the devices that exist then, and never others.
    """
    probe = torch.zeros((), device=device, requires_grad=True)
    try:
        torch.autograd.grad(probe.view(1).sum(), probe)
    except RuntimeError as error:
        raise RuntimeError(
            "device='xla': this process has run a backward before its XLA device started, and torch's autograd then "
            "knows no other device. Call initialize_model_parallel(device='xla') before the first backward of the "
            "process, or torch_xla.device() if the backward must come first."
        ) from error
