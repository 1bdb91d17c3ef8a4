"""A load of all ranks: each reads its own rectangles of what any layout has saved.

::

    rank 0       reads the document ─▶ all ranks
    all ranks    verify names, shapes and groups ─▶ read into memory that is there ─▶ send to replicas
    all ranks    take over the rest
"""

import errno
import socket
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nxdpp.checkpoint.distributed.captured import Stateful, layout
from nxdpp.checkpoint.distributed.document import Document, parsed_document, read_document, tensors_of
from nxdpp.checkpoint.distributed.document_content import check_content
from nxdpp.checkpoint.distributed.document_tensors import check_files
from nxdpp.checkpoint.distributed.model_state import ModelTensors, is_pipelined, model_tensors
from nxdpp.checkpoint.distributed.optimizer_state import MASTER, held_state, is_stepped, not_sharded, optimizer_class
from nxdpp.checkpoint.distributed.parameter_groups import SavedGroup, new_options
from nxdpp.checkpoint.distributed.planners import BlocksLoadPlanner
from nxdpp.checkpoint.distributed.random_state import check_random_state, set_random_state
from nxdpp.checkpoint.distributed.ranks import Exchange
from nxdpp.checkpoint.distributed.rectangles import placement_of
from nxdpp.checkpoint.distributed.shared_reads import SharedReads
from nxdpp.checkpoint.distributed.structured import decoded
from nxdpp.checkpoint.distributed.tensor_blocks import TensorBlocks, blocks_of, whole
from nxdpp.checkpoint.files.checksummed import ChecksummedReader, DamagedFile, Span, read_region
from nxdpp.checkpoint.huggingface.model_tensors import PipelinedModel
from nxdpp.initialization.allocation import with_type_of
from nxdpp.parallel_layers.replaced_parameters import check_no_optimizer_holds

_SHOWN = 10
MIXED = "The model has values of two origins now: load another checkpoint, or end the program."


class Load:
    """One load. Its methods are collective over all ranks, in their order.

    Args:
        folder: directory of the checkpoint.
        exchange: of all ranks.

    Raises ``OSError``, ``DamagedFile`` and ``ValueError`` for the document, on all ranks.
    """

    def __init__(self, folder: Path, exchange: Exchange) -> None:
        self._folder = folder
        self.exchange = exchange
        text = zlib.decompress(exchange.from_first(lambda: zlib.compress(read_document(folder), 1)))
        exchange.together(self._check_shared)
        document = exchange.together(lambda: self._document(text))
        self.content = document.content
        self._metadata = document.metadata
        self._saved = tensors_of(document.metadata)
        self._targets: dict[str, TensorBlocks] = {}
        self._of_replicas: set[str] = set()
        self._made: dict[str, torch.Tensor] = {}
        self._after: list[Callable[[], Any]] = []
        self._user_content: Any = None

    def prepare(
        self,
        model: nn.Module | None,
        optimizer: Optimizer | None,
        scheduler: Stateful | None,
        grad_scaler: Stateful | None,
        strict: bool,
    ) -> None:
        """Verify that the checkpoint fits, before anything is changed.

        Raises ``ValueError`` on all ranks for names, shapes, dtypes or groups that do not.
        """
        tensors = self.exchange.together(lambda: None if model is None else model_tensors(model))
        self.exchange.together(lambda: self._prepare(model, tensors, optimizer, scheduler, grad_scaler, strict))
        if tensors is not None and strict:
            self.exchange.through_first(list(tensors.tensors), self._check_unexpected)
        if tensors is not None and optimizer is not None:
            names = tensors.names()
            if strict:
                own = [names[id(each)] for group in optimizer.param_groups for each in group["params"]]
                self.exchange.through_first(own, self._check_stepped)
            self._warn_of_masters(optimizer, names)
            self._warn_of_left_out({"scheduler": scheduler, "grad_scaler": grad_scaler})

    def read(self) -> Any:
        """Read this rank's part, take over the state, and return the user's content."""
        shared = {name: blocks for name, blocks in self._targets.items() if name in self._of_replicas}
        reads = SharedReads(shared, self.exchange)
        self.exchange.together(lambda: self._read(reads))
        reads.send()
        self.exchange.together(self._take_over)
        return self._user_content

    def _document(self, text: bytes) -> Document:
        """The document, checked; rank 0 compares the sizes of all files too, before anything is allocated."""
        document = parsed_document(self._folder, text)
        try:
            check_content(document.content, tensors_of(document.metadata))
        except ValueError as error:
            raise DamagedFile(f"the document of {self._folder} is damaged: {error}.") from error
        if self.exchange.rank == 0:
            check_files(self._folder, document.metadata)
        return document

    def _check_shared(self) -> None:
        if not self._folder.is_dir():
            raise OSError(
                errno.ENOENT,
                f"rank {self.exchange.rank} on {socket.gethostname()} does not find {self._folder}, and rank 0 does: "
                f"it must be on a file system that all hosts share. Nothing was loaded",
            )

    def names_in_use(self) -> set[str]:
        """Names of the tensors that are read into memory in use: of the model, and master copies of an optimizer."""
        return {name for name in self._targets if name.startswith("model.") or name.endswith(f".{MASTER}")}

    def _prepare(
        self,
        model: nn.Module | None,
        tensors: ModelTensors | None,
        optimizer: Optimizer | None,
        scheduler: Stateful | None,
        grad_scaler: Stateful | None,
        strict: bool,
    ) -> None:
        if tensors is not None:
            assert model is not None
            self._add_model(model, tensors, strict)
        if optimizer is not None:
            if tensors is None:
                raise ValueError("an optimizer is loaded with the model whose parameters it has: give model= too.")
            self._add_optimizer(optimizer, tensors, strict)
        for name, one in (("scheduler", scheduler), ("grad_scaler", grad_scaler)):
            if one is None:
                continue
            if self.content[name] is None:
                raise ValueError(f"{self._folder} has no {name}: leave out {name}=.")
            self._add_made(name)
            state = self._decoded(name)
            if not isinstance(state, dict):
                raise DamagedFile(f"{name} of {self._folder} is damaged: it is a {type(state).__name__}.")
            if isinstance(one, LRScheduler):
                self._check_rates(one, state)
            self._after.append(partial(one.load_state_dict, state))
        self._add_made("user_content")
        # Tensors in it get their values later.
        self._user_content = self._decoded("user_content")
        self._add_random()

    def _check_rates(self, scheduler: LRScheduler, state: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` for the state of another class: ``load_state_dict`` of torch takes any."""
        saved, own = ({key for key in each if not key.startswith("_")} for each in (state, scheduler.state_dict()))
        if saved != own:
            raise ValueError(
                f"the scheduler of {self._folder} has {', '.join(sorted(saved - own)) or 'no other state'}, and this "
                f"{type(scheduler).__name__} has {', '.join(sorted(own - saved)) or 'no other state'}: make the "
                f"scheduler that was saved, or leave out scheduler=. Nothing was loaded."
            )

    def _add_model(self, model: nn.Module, tensors: ModelTensors, strict: bool) -> None:
        saved_ties: Mapping[str, str] = self.content["ties"] or {}
        if self.content["ties"] is None:
            raise ValueError(f"{self._folder} has no model: leave out model=.")
        replaced: list[tuple[torch.Tensor, torch.Tensor]] = []
        missing = []
        for name, tensor in tensors.tensors.items():
            source = self._shaped(f"model.{saved_ties.get(name, name)}")
            if source is None:
                missing.append(name)
                continue
            placement = placement_of(tensor)
            if torch._debug_has_internal_overlap(tensor) == 1:
                raise ValueError(f"{name} is an expanded tensor, whose elements share memory: make it by .clone().")
            if tuple(source.size) != placement.shape or source.properties.dtype != tensor.dtype:
                raise ValueError(
                    f"{name} is of shape {list(source.size)} and {source.properties.dtype} in {self._folder}, and of "
                    f"{list(placement.shape)} and {tensor.dtype} in the model: build the model that was saved."
                )
            real = tensor
            if tensor.is_meta:
                if not is_pipelined(model):
                    raise ValueError(f"{name} is on the meta device: wrap the model, or give it memory by to_empty().")
                real = with_type_of(torch.zeros_like(tensor, device="cpu", requires_grad=False), tensor)
                replaced.append((tensor, real))
            self._of_replicas.add(f"model.{saved_ties.get(name, name)}")
            self._add(f"model.{saved_ties.get(name, name)}", blocks_of(real, placement))
        if missing and strict:
            raise ValueError(
                f"{self._folder} lacks {_listed(missing)} of the model. Nothing was loaded: build the model that was "
                f"saved, or give strict=False."
            )
        if is_pipelined(model):
            pipelined = cast(PipelinedModel, model)
            check_no_optimizer_holds(_parameters(tensors, replaced), "Make the optimizer after load_checkpoint.")
            # Tensors that a checkpoint does not have get initial weights, such as buffers that are not persistent.
            loaded = {id(old) for old, _ in replaced}
            local = pipelined.local_module
            rest = [tensor for tensor in (*local.parameters(), *local.buffers()) if tensor.is_meta]
            rest = [tensor for tensor in rest if id(tensor) not in loaded]
            replaced += zip(rest, pipelined.initial_weights_of(rest), strict=True)
            self._after.append(lambda: pipelined.replace_local_tensors(replaced))

    def _add_optimizer(self, optimizer: Optimizer, tensors: ModelTensors, strict: bool) -> None:
        saved = self.content["optimizer"]
        if saved is None:
            raise ValueError(f"{self._folder} has no optimizer: leave out optimizer=.")
        own = optimizer_class(optimizer)
        if saved["class"] != own:
            raise ValueError(
                f"{self._folder} has the state of {saved['class']}, and the optimizer is {own}: make the optimizer "
                f"that was saved, or leave out optimizer=."
            )
        names = tensors.names()
        options = new_options(optimizer, names, [SavedGroup(**group) for group in saved["groups"]])
        states = saved["states"]
        place = {name: number for number, group in enumerate(saved["groups"]) for name in group["names"]}
        for held in list(held_state(optimizer, names)):
            described = states.get(held.name, {})
            state = held.new_state(described, options[place[held.name]])
            for key, value in state.items():
                if "tensor" in described[key]:
                    self._targets[f"optimizer.{held.name}.{key}"] = held.blocks(value)
                    if not held.is_shard:
                        self._of_replicas.add(f"optimizer.{held.name}.{key}")
            self._after.append(partial(held.give, state, described))
        frozen = [name for name in not_sharded(optimizer, names) if is_stepped(states.get(name, {}))]
        if frozen and strict:
            raise ValueError(
                f"{self._folder} has the optimizer's state of {_listed(frozen)}, which do not require a gradient: call "
                f"requires_grad_(True) before the load. Nothing was loaded; strict=False leaves their state out."
            )
        self._after.append(partial(_give_options, optimizer, options))

    def _add_random(self) -> None:
        saved = self.content["random"]
        if self.content["layout"] != layout():
            # Other ranks draw for other layers: their states have no meaning here.
            return
        name = f"random.{self.exchange.rank}"
        self._add_made(name)
        check_random_state(saved[self.exchange.rank], self._folder)
        self._after.append(lambda: set_random_state(saved[self.exchange.rank], self._made))

    def _add_made(self, prefix: str) -> None:
        """Read whole the tensors that are ``prefix``, or begin with it and a separator, into new memory."""
        for name in self._saved:
            if name != prefix and not name.startswith((f"{prefix}.", f"{prefix}[")):
                continue
            saved = self._shaped(name)
            assert saved is not None
            self._made[name] = torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")
            self._add(name, whole(self._made[name]))

    def _add(self, name: str, blocks: TensorBlocks) -> None:
        first = self._targets.setdefault(name, blocks)
        if first is not blocks:
            # Two tensors of this model were one: the second gets the values of the first.
            self._after.append(partial(_copy_blocks, first, blocks))

    def _take_over(self) -> None:
        for act in self._after:
            act()

    def _decoded(self, name: str) -> Any:
        try:
            return decoded(self.content[name], self._made)
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise DamagedFile(f"{name} of {self._folder} is damaged ({type(error).__name__}: {error}).") from error

    def _shaped(self, name: str) -> TensorStorageMetadata | None:
        return self._saved.get(name)

    def _check_unexpected(self, of_ranks: list[list[str]]) -> Sequence[None]:
        """On rank 0: raise ``ValueError`` for saved names that no rank's model has."""
        known = {name for names in of_ranks for name in names}
        ties = self.content["ties"]
        known |= {ties.get(name, name) for name in known}
        saved = [name.removeprefix("model.") for name in self._saved if name.startswith("model.")]
        unexpected = [name for name in saved if name not in known]
        if unexpected:
            raise ValueError(
                f"{self._folder} has {_listed(unexpected)}, which the model does not have. Nothing was loaded; "
                f"strict=False leaves them out."
            )
        return [None] * len(of_ranks)

    def _check_stepped(self, of_ranks: list[list[str]]) -> Sequence[None]:
        """On rank 0: raise ``ValueError`` for parameters of the saved optimizer that no rank's optimizer has."""
        known = {name for names in of_ranks for name in names}
        saved = [name for group in self.content["optimizer"]["groups"] for name in group["names"]]
        others = [name for name in saved if name not in known]
        if others:
            raise ValueError(
                f"the optimizer of {self._folder} has {_listed(others)}, and this optimizer does not: make it with the "
                f"parameters that were saved. Nothing was loaded; strict=False leaves their state out."
            )
        return [None] * len(of_ranks)

    def _warn_of_left_out(self, given: Mapping[str, Stateful | None]) -> None:
        """Warn on rank 0 of state that the training had and this load leaves out."""
        for name, one in given.items():
            if one is None and self.content[name] is not None and self.exchange.rank == 0:
                warnings.warn(
                    f"{self._folder} has the state of a {name}, which is not loaded: give {name}= too.",
                    stacklevel=4,
                )

    def _warn_of_masters(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """Warn once, on rank 0, of master copies for which ``optimizer`` has no place."""
        states = self.content["optimizer"]["states"]
        left = [held.name for held in held_state(optimizer, names) if held.leaves_master(states.get(held.name, {}))]
        of_ranks = self.exchange.all_of(left)
        every = sorted({name for own in of_ranks for name in own})
        if every and self.exchange.rank == 0:
            warnings.warn(
                f"{self._folder} has float32 master copies of {_listed(every)}, and the optimizer keeps none: they are "
                f"left out. The training goes on from rounded parameters and rounded state.",
                stacklevel=4,
            )

    def _read(self, reads: SharedReads) -> None:
        planner = BlocksLoadPlanner()
        own = {name: blocks for name, blocks in self._targets.items() if reads.is_read_here(name)}
        planner.set_up_planner(own, self._metadata)
        try:
            read_plan(self._folder, self._metadata, planner, planner.create_local_plan())
        except (DamagedFile, OSError) as error:
            error.add_note(MIXED)
            raise


def read_plan(folder: Path, metadata: Metadata, planner: BlocksLoadPlanner, plan: LoadPlan) -> None:
    """Read the rectangles of ``plan`` in the order of the files. Raises ``DamagedFile`` and ``OSError``."""
    spans: Mapping[MetadataIndex, Span] = metadata.storage_data
    tensors = tensors_of(metadata)
    with ChecksummedReader(folder) as reader:
        for item in sorted(plan.items, key=lambda item: spans[item.storage_index][:2]):
            index = item.storage_index
            saved = tensors[index.fqn]
            assert index.index is not None, "the planner gives the place among the rectangles"
            shape, dtype = saved.chunks[index.index].sizes, saved.properties.dtype
            read_region(reader, spans[index], shape, item.storage_offsets, planner.resolve_tensor(item), dtype)


def _parameters(
    tensors: ModelTensors, replaced: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> dict[str, nn.Parameter]:
    """The parameters that are replaced, by name."""
    old = {id(tensor) for tensor, _ in replaced}
    return {
        name: tensor
        for name, tensor in tensors.tensors.items()
        if id(tensor) in old and isinstance(tensor, nn.Parameter)
    }


def _give_options(optimizer: Optimizer, options: Sequence[dict[str, Any]]) -> None:
    for group, own in zip(optimizer.param_groups, options, strict=True):
        for key, value in own.items():
            old = group.get(key)
            # A rate in a tensor is where the optimizer reads it.
            if isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor):
                value = value.to(old.device)
            group[key] = value


def _copy_blocks(source: TensorBlocks, destination: TensorBlocks) -> None:
    for one, other in zip(source.blocks, destination.blocks, strict=True):
        other.values.copy_(one.values)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
