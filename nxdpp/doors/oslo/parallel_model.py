"""Methods and attributes that ``initialize`` adds to a model, which stays the same object."""

import functools
import os
from collections.abc import Mapping
from typing import Any, NoReturn, Self, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from nxdpp.doors.oslo import checkpoints
from nxdpp.doors.oslo.equal_ranks import allow, verify_equal
from nxdpp.doors.oslo.mpu import MPU
from nxdpp.generation.batches import samples
from nxdpp.ranks import parallel_state
from nxdpp.tensor.rank_files import local_path

_made: dict[type[nn.Module], type[nn.Module]] = {}


class ParallelModel:
    """A model of transformers that ``initialize`` has divided over ranks.

    Its class is a subclass of this one and of the model's own class, with the name of the own class.

    Attributes:
        mpu: groups, ranks and sizes.
    """

    mpu: MPU

    def save_parallelized(
        self,
        save_directory: str | os.PathLike[str],
        save_config: bool = True,
        state_dict: Mapping[str, Any] | None = None,
        save_function: checkpoints.SaveFunction = torch.save,
        merge_checkpoints: bool = False,
    ) -> None:
        """Write the model to ``save_directory``, which is made if absent; collective over all ranks.

        Ranks of the first replica write their tensors to ``pytorch_model_tp_{tensor rank}_pp_0.bin``.
        With ``merge_checkpoints`` rank 0 writes the whole tensors to ``pytorch_model.bin``, which ``from_pretrained``
        reads, and needs memory for all of them. Files of an earlier save are replaced when all ranks have
        written theirs.

        Args:
            save_directory: seen by all ranks, or by the ranks of one host.
            save_config: write ``config.json`` too.
            state_dict: this rank's tensors by name, instead of the model's; not for merged checkpoints.
            save_function: writes an object to a path.
            merge_checkpoints: write one file of transformers.

        Raises:
            NotADirectoryError: for a file instead of a directory.
            ValueError: for a directory with files of different sizes, or with files that ``from_pretrained`` would
                read in place of the merged one.
            OSError: for a file that cannot be written.
            RuntimeError: on the other ranks, for an error of one rank.
        """
        model, directory = cast(PreTrainedModel, self), local_path(save_directory)
        if not merge_checkpoints:
            state = checkpoints.local_state(model) if state_dict is None else state_dict
            checkpoints.save_parts(model, self.mpu, directory, state, save_config, save_function)
            return
        if state_dict is not None:
            raise ValueError(
                "state_dict has tensors of one rank, and merge_checkpoints=True gathers those of the model"
            )
        checkpoints.save_merged(model, self.mpu, directory, save_config, save_function)

    def from_parallelized(self, load_directory: str | os.PathLike[str]) -> Self:
        """Load the files that ``save_parallelized`` wrote for the same sizes, and return the model itself.

        Collective over all ranks. Optimizers stay valid: values are copied into the parameters.

        Raises:
            NotADirectoryError: for a directory that does not exist.
            FileNotFoundError: for a directory without this rank's file.
            ValueError: for files of different sizes, and of a different model. Nothing is changed then.
            RuntimeError: on the other ranks, for an error of one rank.
        """
        model = cast(PreTrainedModel, self)
        checkpoints.load_parts(model, self.mpu, local_path(load_directory))
        allow(model)
        return self


def is_parallel(model: PreTrainedModel) -> bool:
    """Return whether ``model`` was given to ``initialize``."""
    return "mpu" in vars(model)


def make_parallel(model: PreTrainedModel, mpu: MPU) -> None:
    """Make ``model`` a ``ParallelModel``."""
    vars(model)["mpu"] = mpu
    model.__class__ = _parallel_class(type(model))
    if mpu.get_tensor_parallel_world_size() > 1:
        vars(model).update(save_pretrained=_save_pretrained, resize_token_embeddings=_resize_token_embeddings)


def _save_pretrained(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "save_pretrained would write the tensors of one rank: call save_parallelized(directory, "
        "merge_checkpoints=True) on every rank"
    )


def _resize_token_embeddings(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "resize_token_embeddings would give each rank a vocabulary of its own: call it before oslo.initialize"
    )


def _parallel_class(own: type[Any]) -> type[Any]:
    if own not in _made:
        own_names = {"__module__": own.__module__, "__doc__": own.__doc__}
        _made[own] = type(own.__name__, (ParallelModel, own), {**own_names, **_generation_of(own)})
    return _made[own]


def _generation_of(own: type[PreTrainedModel]) -> dict[str, Any]:
    """Return the method ``generate`` of a parallel model whose class was ``own``, if that has one.

    It is collective over the tensor group, and compares its arguments there.
    """
    if not hasattr(own, "generate"):
        return {}

    @functools.wraps(own.generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if parallel_state.get_tensor_model_parallel_size() > 1:
            verify_equal(
                (args, kwargs, _next_number() if samples(self, kwargs) else None),
                "give all ranks of a tensor group the same arguments, and call torch.manual_seed with one number on "
                "them before sampling.",
            )
        return own.generate(self, *args, **kwargs)

    return {"generate": generate}


def _next_number() -> float:
    """The next random number of this rank's device, whose state stays."""
    device = parallel_state.local_device()
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        return float(torch.rand((), device=device))
