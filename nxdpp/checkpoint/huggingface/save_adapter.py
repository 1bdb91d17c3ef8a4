"""Save of an adapted model: PEFT's own files, written by rank 0 from the parts of all ranks.

::

    .unfinished/adapter-00001.safetensors     each rank writes its tensors of the adapter
    .unfinished/adapter/                      rank 0: PeftModel.save_pretrained with all of them
    adapter_config.json, README.md            rank 0 replaces an earlier adapter, see ``replace_adapter``
    adapter_model.safetensors
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from nxdpp.checkpoint.files.checksummed_writer import write_shard
from nxdpp.checkpoint.huggingface.adapted import PROMPTS, adapter_names, learns_prompts
from nxdpp.checkpoint.huggingface.model_tensors import tensors_of, unwrapped_name
from nxdpp.checkpoint.huggingface.read_directory import UNFINISHED
from nxdpp.checkpoint.huggingface.replace_adapter import replace_adapter
from nxdpp.pipeline.local.own_save import naming


def names_to_gather(module: Any) -> list[str]:
    """Names in ``module`` of the tensors that the files of its adapters are made of."""
    names: dict[str, None] = {}
    for adapter in module.peft_config:
        if learns_prompts(module, adapter):
            names |= {name: None for name in tensors_of(module) if name.startswith(PROMPTS)}
        else:
            names |= dict.fromkeys(adapter_names(module, adapter).values())
    return list(names)


class SavedAdapter:
    """``directory`` while the tensors ``holders``, by name with the rank that writes them, become adapter files."""

    def __init__(self, directory: Path, holders: Mapping[str, int]) -> None:
        self._directory = directory
        self._unfinished = directory / UNFINISHED
        self._holders = holders

    def write(self, rank: int, local: Mapping[str, torch.Tensor]) -> None:
        """Write the tensors of ``rank``."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._unfinished.mkdir(exist_ok=True)
        mine = {name: local[name] for name, holder in self._holders.items() if holder == rank}
        if mine:
            write_shard(self._part(rank), mine)

    def finish(self, module: Any) -> None:
        """Complete the files after all ranks have written; rank 0 calls it.

        Raises ``RuntimeError`` if other ranks' files are not visible.
        """
        tensors: dict[str, torch.Tensor] = {}
        for rank in sorted(set(self._holders.values())):
            if not self._part(rank).is_file():
                raise RuntimeError(
                    f"{self._part(rank)}, which rank {rank} has written, is not visible to rank 0: give all ranks one "
                    f"shared directory."
                )
            tensors |= load_file(self._part(rank))
        made = self._unfinished / "adapter"
        made.mkdir(exist_ok=True)
        with _put(tensors, module), naming():
            type(module).save_pretrained(module, str(made))
        replace_adapter(made, self._directory)
        shutil.rmtree(self._unfinished, ignore_errors=True)

    def remove_unfinished(self, rank: int) -> None:
        """Remove the files of ``rank``, as far as possible."""
        self._part(rank).unlink(missing_ok=True)
        if rank == 0:
            shutil.rmtree(self._unfinished / "adapter", ignore_errors=True)
        with suppress(OSError):
            # Only the last rank finds the folder empty.
            self._unfinished.rmdir()

    def _part(self, rank: int) -> Path:
        return self._unfinished / f"adapter-{rank:05d}.safetensors"


def holders_of(
    names: Sequence[str], mates: Mapping[str, Sequence[str]], held: Sequence[Mapping[str, Any] | None]
) -> dict[str, int]:
    """The first rank that holds each of ``names``, under this name or another name of a tied weight."""

    def first(name: str) -> int:
        own = mates.get(name, [name])
        return next(rank for rank, tensors in enumerate(held) if tensors and any(mate in tensors for mate in own))

    return {name: first(name) for name in names}


@contextmanager
def _put(tensors: Mapping[str, torch.Tensor], module: nn.Module) -> Iterator[None]:
    """Put ``tensors`` into ``module`` by name; restore its own afterwards."""
    with ExitStack() as stack:
        modules = {unwrapped_name(name): child for name, child in module.named_modules(remove_duplicate=False)}
        for name, tensor in tensors.items():
            owner, _, key = name.rpartition(".")
            parent = modules[owner]
            registry: dict[str, Any] = parent._parameters if key in parent._parameters else parent._buffers
            stack.callback(registry.__setitem__, key, registry[key])
            is_parameter = registry is parent._parameters
            registry[key] = nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
        yield
