"""Verification that all ranks have the same versions of torch and transformers.

Hosts of a job may have environments of their own. Another version may compute other numbers from the same graph.
"""

from importlib import metadata

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # public, though not in its __all__


def check_same_versions(store: Store) -> None:
    """Raise ``RuntimeError`` for versions that differ from the first rank's; all ranks call it."""
    own = f"{dist.get_rank()}|torch {torch.__version__}|transformers {_version('transformers')}"
    first = store.compare_set("nxdpp_versions", "", own).decode()
    there, *theirs = first.split("|")
    here, *ours = own.split("|")
    if theirs != ours:
        pairs = [pair for pair in zip(theirs, ours, strict=True) if pair[0] != pair[1]]
        raise RuntimeError(
            f"rank {there} has {' and '.join(pair[0] for pair in pairs)}, and rank {here} has "
            f"{' and '.join(pair[1] for pair in pairs)}: they may compute different numbers. Install the same versions "
            f"on all hosts."
        )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(none)"
