"""Files of NeuronX Distributed's ranks that its converter reads and writes, with ``weights_only=True``.

::

    tp_rank_01_pp_rank_00/checkpoint.pt                         parallel_layers.save
    tp_rank_01_pp_rank_00                                       the same with save_xser
    dp_rank_00_tp_rank_01_pp_rank_00.pt                         save_checkpoint, in TAG/model
    dp_rank_00_ep_rank_00_tp_rank_01_pp_rank_00.pt              the same with expert parallelism
    ... .tensors/tensor_7.pt                                    tensors of a file with save_xser or use_xser
"""

from pathlib import Path
from typing import Any

import torch

from nxdpp.tensor.rank_files import rank_name, read_file

_REFERENCE = "torch_xla.utils.serialization.TensorReference"


class _TensorReference:
    """The place of a tensor in a file of torch_xla: the number ``tid`` of the tensor's own file."""

    tid: int


def file_of_rank(folder: Path, tensor: int, pipeline: int, expert: int = 0) -> Path:
    """Return the file of a rank in ``folder``. Raises ``FileNotFoundError`` with the names that it may have."""
    name = rank_name(tensor, pipeline)
    names = [
        f"{name}/checkpoint.pt",
        name,
        trainer_name(tensor, pipeline),
        trainer_name(tensor, pipeline, expert),
    ]
    found = next((folder / each for each in names if (folder / each).is_file()), None)
    if found is None:
        raise FileNotFoundError(f"{folder} has none of {', '.join(names)}: give the files of all ranks of one save.")
    return found


def trainer_name(tensor: int, pipeline: int, expert: int | None = None) -> str:
    """Name of the file of a rank in ``save_checkpoint``'s directory of a model."""
    experts = "" if expert is None else f"ep_rank_{expert:02d}_"
    return f"dp_rank_00_{experts}tp_rank_{tensor:02d}_pp_rank_{pipeline:02d}.pt"


def read_rank(path: Path, key: str | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors of ``path``, or of its entry ``key`` where it has one; runs no code of the file.

    Raises ``ValueError`` for a damaged file, for one that needs code, and for one with other values than tensors.
    """
    tensors = path.with_name(f"{path.name}.tensors")
    if tensors.is_dir():
        with torch.serialization.safe_globals([(_TensorReference, _REFERENCE)]):
            content = read_file(path)
        content = _with_tensors(content, tensors)
    else:
        content = read_file(path, in_file=True)
    if isinstance(content, dict) and "param_groups" in content:
        raise ValueError(
            f"{path} is the state of an optimizer, and is not converted: NeuronX Distributed numbers its parameters in "
            f"the order of the script's groups, and a name of a parameter is in none of its files. Give the directory "
            f"model next to it; a training begins with a new optimizer."
        )
    if isinstance(content, dict) and isinstance(content.get(key), dict):
        content = content[key]
    others = [name for name, value in content.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ValueError(f"{others[0]!r} in {path} is no tensor: give --model_key, the entry of the model's state.")
    return dict(content)


def _with_tensors(content: Any, folder: Path) -> Any:
    """Return ``content`` with the tensors that it refers to."""
    if isinstance(content, _TensorReference):
        return read_file(folder / f"tensor_{int(content.tid)}.pt")
    if isinstance(content, dict):
        return {name: _with_tensors(value, folder) for name, value in content.items()}
    return content
