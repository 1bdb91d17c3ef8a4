"""Checkpoints of a training, with the names of NeuronX Distributed's trainer.

::

    nxdpp.save_checkpoint("out", "step_100", model, optimizer, scheduler, {"step": 100}, num_kept_ckpts=3)
    content = nxdpp.load_checkpoint("out", None, model, optimizer, scheduler)       # the newest

NeuronX Distributed's developer guide for saving and loading checkpoints has the same names and meanings.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from nxdpp.checkpoint.dcp.save import DcpSave
from nxdpp.checkpoint.distributed import directory
from nxdpp.checkpoint.distributed.captured import captured
from nxdpp.checkpoint.distributed.collective_call import KINDS, CollectiveCall, same_call
from nxdpp.checkpoint.distributed.load import load_first_whole
from nxdpp.checkpoint.distributed.load_targets import LoadArguments
from nxdpp.checkpoint.distributed.remote_directory import RemoteDirectory, staged
from nxdpp.checkpoint.distributed.remote_save import RemoteSave
from nxdpp.checkpoint.distributed.save import BackgroundSaves, Save
from nxdpp.doors.nxd import checkpoint_arguments as arguments
from nxdpp.ranks.exchange import Exchange
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.board import board

_saves = BackgroundSaves()
_T = TypeVar("_T")
OneOrSeveral: TypeAlias = _T | Sequence[_T] | Mapping[str, _T]


def save_checkpoint(
    path: str | os.PathLike[str],
    tag: str | int = "",
    model: nn.Module | None = None,
    optimizer: OneOrSeveral[Optimizer] | None = None,
    scheduler: OneOrSeveral[Stateful] | None = None,
    user_content: Any = None,
    num_workers: int = 8,
    use_xser: bool = False,
    num_kept_ckpts: int | None = None,
    async_save: bool = False,
    zero1_optimizer: bool = False,
    use_zero1_dcp: bool = False,
    avoid_saving_lower_precision_weights: bool = False,
    *,
    grad_scaler: Stateful | None = None,
    format: str = "nxdpp",
) -> None:
    """Save a training in ``path/tag``, for any layout of ranks to load; collective over all ranks.

    A checkpoint has original names and whole shapes. The states of all ranks' random generators belong to it. Files
    come first, then the document that makes it count, then ``path/latest``; older checkpoints are removed after that.
    An existing tag is replaced in the same way. ``path`` is on a file system that all hosts share, or the address of
    S3, Google's or Azure's store for fsspec, such as ``"s3://bucket/run"``: each rank then writes its file below
    ``$TMPDIR`` and sends it. Nothing keeps two programs from saving at one address.

    Args:
        path: directory of the training's checkpoints, made if it is missing; or its address.
        tag: name of this one, such as ``"step_100"``. The default is refused: each checkpoint has a name.
        model: an ``NxDPPModel``, an ``NxDModel``, or a module that each rank has whole.
        optimizer: of torch, a ``Zero1Optimizer`` or an ``NxDOptimizer``, over parameters of ``model``. Or several, each
            over other parameters: a list of them, or a dict by name. Groups may differ from rank to rank, such as rates
            by layer: a load gives each parameter the options of its group, whatever the layout.
        scheduler, grad_scaler: objects with ``state_dict``; rank 0 saves its own, and of schedulers the values for the
            groups of all ranks. Several schedulers in a list or a dict.
        user_content: of rank 0: numbers, strings, tensors, lists, tuples and dicts of them.
        num_workers: without effect. Each rank writes its own part without a copy of it in host memory, so all may
            write at once.
        use_xser: without effect: files are safetensors. They are written tensor by tensor.
        num_kept_ckpts: number of checkpoints to keep, at least 1; ``None`` and -1 keep all.
        async_save: return when the values are copied to host memory. A thread writes them. Its error is raised by a
            training step, the same step on every rank, or by an earlier call of these functions. A program that ends
            before either prints the error, and has status 1.
        zero1_optimizer: without effect: it is about the state dict of an optimizer, which is refused.
        use_zero1_dcp: without effect: torch.distributed.checkpoint plans all saves.
        avoid_saving_lower_precision_weights: without effect: the weights are saved next to the master weights of
            ZeRO-1, so that a model can be loaded without its optimizer.
        format: ``"nxdpp"``, or ``"dcp"``: ``torch.distributed.checkpoint.load`` and ``dcp_to_torch_save`` read
            ``path/tag`` too. It has ``model`` and ``optimizer`` with the names that torch's ``get_state_dict`` has in
            one process. Not in a store.

    Raises:
        ValueError: for content that a checkpoint cannot hold, and for states of ranks that contradict each other. For
            arguments that differ between ranks. Nothing is written then.
        TypeError: for a state dict instead of a model or an optimizer, and for other objects.
        OSError: for files that cannot be written. Earlier checkpoints stay, and the training can continue.
        RuntimeError: in the debug mode, for a directory that hosts do not share, and after a step that has failed or a
            load that failed midway. Where another program saves in ``path``.
    """

    kept = None if num_kept_ckpts == -1 else num_kept_ckpts

    def call() -> CollectiveCall:
        arguments.check_parts(model, optimizer, scheduler, grad_scaler)
        arguments.check_kept(kept)
        arguments.check_format(format, arguments.place_of(path))
        compared = {
            "path": repr(str(arguments.place_of(path))),
            "tag": repr(arguments.tag_of(tag)),
            **_parts(model, optimizer, scheduler, grad_scaler),
            "num_kept_ckpts": str(kept),
            "async_save": str(bool(async_save)),
            "format": repr(format),
        }
        of_first = [] if user_content is None else ["user_content"]
        return CollectiveCall("save_checkpoint", compared, of_first)

    failure_watch.refuse_after_failure()
    with board.call("save_checkpoint"):
        exchange = Exchange(kinds=KINDS)
        same_call(exchange, call)
        _saves.wait()
        own = arguments.model_of(model), arguments.optimizers_of(optimizer), arguments.scheduler_of(scheduler)
        state = exchange.together(lambda: captured(*own, grad_scaler, user_content))
        place, name = arguments.place_of(path), arguments.tag_of(tag)
        if isinstance(place, str):
            save: Save = RemoteSave(place, name, kept, exchange)
        else:
            # The working directory can change while a thread writes.
            folder = (place.absolute() if async_save else place) / name
            save = (DcpSave if format == "dcp" else Save)(folder, kept, exchange)
        if async_save:
            _saves.start(save, state)
        else:
            save.write(save.plan(state))


def finalize_checkpoint() -> None:
    """Wait until the save in flight is at its end, and free the host memory of asynchronous saves.

    After that a different program may save in the directory. Collective over all ranks. Raises the error of that save.
    """
    failure_watch.refuse_after_failure()
    with board.call("finalize_checkpoint"):
        exchange = Exchange(kinds=KINDS)
        same_call(exchange, lambda: CollectiveCall("finalize_checkpoint"))
        exchange.together(_saves.wait)
        _saves.close()
        directory.release()


def has_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` has a checkpoint that was saved to its end, also by torch's; not collective.

    Raises ``NotADirectoryError`` where a save would meet a file in the place of a directory. Raises as the save does
    for an address: a script that asks at its start learns of it before the first step.
    """
    place = arguments.place_of(path)
    if isinstance(place, Path):
        directory.check_directory(place)
        return bool(directory.tags(place) or directory.tags_of_torch(place))
    with staged(place) as remote:
        remote.fill(whole=False)
        return bool(directory.tags(remote.local))


def load_checkpoint(
    path: str | os.PathLike[str],
    tag: str | int | None = None,
    model: nn.Module | None = None,
    optimizer: OneOrSeveral[Optimizer] | None = None,
    scheduler: OneOrSeveral[Stateful] | None = None,
    num_workers: int = 8,
    strict: bool = True,
    use_zero1_dcp: bool = False,
    *,
    grad_scaler: Stateful | None = None,
) -> Any:
    """Load what ``save_checkpoint`` has saved in any layout of ranks; collective over all ranks.

    Values are read into the memory of ``model`` and ``optimizer``. Each rank reads its own part, from a store by
    ranges of bytes. In the layout that was saved the random generators continue too.

    All bytes are verified on all ranks before a tensor changes. They are read once where half of the host's free memory
    has room for them, and otherwise a second time. If the load fails after that, as of a file that changes under it,
    steps and saves of ``model`` and ``optimizer`` are refused on all ranks until a load succeeds.

    Args:
        path: directory of the training's checkpoints.
        tag: ``None`` loads the newest. One that is damaged is named in a warning, and the next older one is loaded.
            The name of a directory that torch.distributed.checkpoint wrote loads its model, and an optimizer's state
            as ``get_state_dict`` names it. There are no checksums, and the optimizer's class is not known.
        model, optimizer, scheduler, grad_scaler: as in the save, several optimizers by the same names; what is left out
            is not loaded. Groups may be arranged anew if each has parameters that had equal options. Frozen quantized
            weights of bitsandbytes and torchao are in no checkpoint: give the same base as in the save.
        num_workers, use_zero1_dcp: as in the save.
        strict: ``False`` allows names that only the model, or only the checkpoint has.

    Returns:
        The user's content, on all ranks; ``None`` without one.

    Raises:
        FileNotFoundError: without a checkpoint, or without the one of ``tag``.
        ValueError: for names, shapes, dtypes or groups that do not fit, and for arguments that differ between ranks.
            For a damaged file of ``tag``, with its name; without ``tag`` if no checkpoint is whole. Nothing is changed
            then.
        TypeError: as in the save.
        OSError: for a file that cannot be read.
        RuntimeError: in the debug mode, and after a step that has failed.
    """

    def call() -> CollectiveCall:
        arguments.check_parts(model, optimizer, scheduler, grad_scaler)
        compared = {
            "path": repr(str(arguments.place_of(path))),
            "tag": repr(None if tag is None else arguments.tag_of(tag)),
            **_parts(model, optimizer, scheduler, grad_scaler),
            "strict": str(bool(strict)),
        }
        return CollectiveCall("load_checkpoint", compared)

    failure_watch.refuse_after_failure()
    with board.call("load_checkpoint"):
        exchange = Exchange(kinds=KINDS)
        same_call(exchange, call)
        _saves.wait()
        place = arguments.place_of(path)
        own = arguments.model_of(model), arguments.optimizers_of(optimizer), arguments.scheduler_of(scheduler)
        with ExitStack() as stack:
            remote: RemoteDirectory | None = None
            if isinstance(place, Path):
                folder = place
            else:
                address = place
                remote = exchange.together(lambda: stack.enter_context(staged(address)))
                folder = remote.local

            def tags_to_load() -> list[str]:
                if remote is not None:
                    remote.fill(whole=False)
                return directory.tags_to_load(folder) if tag is None else [arguments.tag_of(tag)]

            tags = exchange.from_first(tags_to_load)
            if not tags:
                raise FileNotFoundError(f"{path} has no checkpoint: {arguments.remedy_without_checkpoint(place)}")
            folders = [folder / each for each in tags]
            # State that is made in inference mode could not be trained. Tensors of that mode can only be changed in it.
            with torch.inference_mode(arguments.is_of_inference(own[0])):
                given = LoadArguments(*own, grad_scaler, strict)
                return load_first_whole(folders, exchange, given, remote)


def _parts(model: object, optimizer: object, scheduler: object, grad_scaler: object) -> dict[str, str]:
    """The classes of the objects in a checkpoint."""
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "grad_scaler": grad_scaler}
    return {name: arguments.kinds_of(part) for name, part in parts.items()}
