"""Verification that the ranks of one pipeline hold parts of the same model: seeds, dtypes, copies of tied weights.

A rank tells the next one about the values of all ranks before it, in the text of a first step::

    rank 0 ── ties {0: sample}, initial {embed.weight: sample} ──▶ rank 1 ── the same and its own ──▶ rank 2

A rank has the whole model until it is cut. So it knows a sample of each initial weight of the ranks before it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import ref

import torch
from torch import nn

from nxdpp.agreement.fingerprint import digest
from nxdpp.agreement.input_hash import hash_of
from nxdpp.agreement.plain_attributes import check_same_attributes
from nxdpp.counted import counted
from nxdpp.devices.kinds import readable
from nxdpp.ground.torch_names import VERSION

# Enough to notice a different seed. A large model on disk is not read for it.
_INITIAL_ELEMENTS = 16
# Enough to notice a different seed or checkpoint at no cost. It does not verify that all elements are equal.
ELEMENTS = 1024

_SEED = "Give torch.manual_seed the same seed on every rank of a pipeline, before the model is built and wrapped."
Conversions = frozenset[tuple[str, str]]


class Copy(NamedTuple):
    """A rank's copy of a tied weight: its name, dtype and shape, a hash of its values, and how it is trained."""

    rank: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    values: bytes
    requires_grad: bool
    optimizers: str


@dataclass
class Values:
    """Facts about the values of parameters that ranks tell each other.

    Attributes:
        ties: the first owner's copy of each tied weight, by its number.
        initial: for initial weights that a rank still has: the rank, and a hash of a sample.
        seeds: ``torch.initial_seed()`` of each rank when it wrapped the model.
        conversions: the rank, and the dtypes from and to which all of its weights were converted; ``None`` if a rank
            has no floating weights or has converted some.
        loads: the first rank, and how often it has loaded weights by ``load_pretrained``.
        has_loaded_state: the first rank, and whether it has loaded a state dict.
        attributes: the first rank, and the plain attributes that its modules had when it wrapped the model.
    """

    ties: dict[int, Copy] = field(default_factory=dict)
    initial: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    seeds: dict[int, int] = field(default_factory=dict)
    conversions: tuple[int, Conversions] | None = None
    loads: tuple[int, int] | None = None
    has_loaded_state: tuple[int, bool] | None = None
    attributes: tuple[int, Mapping[str, str]] | None = None


class InitialWeights:
    """Samples of the initial weights of a whole model, on one rank.

    ``parameters`` are of the whole model; on the meta device they have no values. This rank keeps the ``local`` ones.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], local: Collection[str]) -> None:
        whole = dict(parameters)
        self.seed = torch.initial_seed()
        self._samples = {name: sample(p, _INITIAL_ELEMENTS) for name, p in whole.items() if not p.is_meta}
        self._dtypes = {name: parameter.dtype for name, parameter in whole.items() if name in local}
        # A load, an initialization or a new tensor in its place changes the values.
        self._kept = {
            name: (ref(whole[name]), VERSION.of(whole[name])) for name in self._dtypes if name in self._samples
        }
        # Of weights that shards have replaced since.
        self.held: dict[str, bytes] = {}

    def forget(self) -> None:
        """Drop the samples: training has begun."""
        self._samples, self._kept, self.held = {}, {}, {}

    def kept(self, now: Mapping[str, nn.Parameter]) -> dict[str, bytes]:
        """Samples of the weights that this rank has as they were; ``now`` are its present parameters."""
        return self.held | {
            name: self._samples[name]
            for name, (known, version) in self._kept.items()
            if known() is not None and now.get(name) is known() and VERSION.of(now[name]) == version
        }

    def different(self, theirs: Mapping[str, tuple[int, bytes]]) -> list[str]:
        """Names of the weights of other ranks that had different initial values on this rank."""
        return [name for name, (_, known) in theirs.items() if self._samples.get(name, known) != known]

    def conversions(self, now: Mapping[str, nn.Parameter]) -> Conversions | None:
        """The dtypes from and to which all floating weights of this rank were converted; see ``Values``."""
        pairs = [
            (str(before), str(now[name].dtype))
            for name, before in self._dtypes.items()
            if name in now and before.is_floating_point
        ]
        changed = [before != after for before, after in pairs]
        if not pairs or any(changed) != all(changed):
            return None
        return frozenset(pairs) if changed[0] else frozenset()


@dataclass(frozen=True)
class RankValues:
    """The values of one rank's part, as they are.

    Attributes:
        rank: pipeline rank of this process.
        initial: samples of the initial weights.
        parameters: of this rank, by name.
        ties: this rank's copies of tied weights, by number.
        loads: how often the rank has loaded weights by ``load_pretrained``.
        has_loaded_state: whether the rank has loaded a state dict.
        attributes: plain attributes of all modules, by path, when the rank wrapped the model.
    """

    rank: int
    initial: InitialWeights
    parameters: Mapping[str, nn.Parameter]
    ties: Mapping[int, Copy]
    loads: int
    has_loaded_state: bool
    attributes: Mapping[str, str]

    def after(self, heard: Values, name: Callable[[int], str]) -> Values:
        """Return what the next rank is told, after the comparison with what this rank has ``heard``.

        ``name`` gives the name of a rank. Raises ``RuntimeError`` for a part of a different model.
        """
        if heard.attributes is not None:
            check_same_attributes(name(heard.attributes[0]), heard.attributes[1], name(self.rank), self.attributes)
        self._check_loads(heard.loads, name)
        self._check_loaded_state(heard.has_loaded_state, name)
        kept = self.initial.kept(self.parameters)
        conversions = self.initial.conversions(self.parameters)
        self._check_conversions(heard.conversions, conversions, name)
        if kept:
            self._check_initial(heard, name)
        self._check_ties(heard, name)
        return Values(
            {**self.ties, **heard.ties},
            heard.initial | {each: (self.rank, known) for each, known in kept.items()},
            heard.seeds | {self.rank: self.initial.seed},
            heard.conversions if conversions is None else (self.rank, conversions),
            heard.loads or (self.rank, self.loads),
            heard.has_loaded_state or (self.rank, self.has_loaded_state),
            heard.attributes or (self.rank, self.attributes),
        )

    def _check_loads(self, heard: tuple[int, int] | None, name: Callable[[int], str]) -> None:
        if heard is not None and heard[1] != self.loads:
            raise RuntimeError(
                f"{name(heard[0])} has called load_pretrained {counted(heard[1], 'time')}, and {name(self.rank)} "
                f"{counted(self.loads, 'time')}: only a part of the model has the loaded weights. Call load_pretrained "
                "on every rank."
            )

    def _check_loaded_state(self, heard: tuple[int, bool] | None, name: Callable[[int], str]) -> None:
        if heard is not None and heard[1] != self.has_loaded_state:
            loaded, other = (heard[0], self.rank) if heard[1] else (self.rank, heard[0])
            raise RuntimeError(
                f"{name(loaded)} has loaded a state dict, and {name(other)} has not: only a part of the model has the "
                f"loaded weights. Call load_state_dict on every rank, with the tensors that local_state_dict() names "
                f"there; on a rank that has none of them load_state_dict({{}}, strict=False)."
            )

    def _check_initial(self, heard: Values, name: Callable[[int], str]) -> None:
        different = self.initial.different(heard.initial)
        if different:
            rank, _ = heard.initial[different[0]]
            raise RuntimeError(
                f"{name(rank)} and {name(self.rank)} have built the model with different initial weights: "
                f"{len(different)} of {len(heard.initial)} differ, the first is {different[0]}.\n"
                f"{self._seeds(heard, rank, name)}{_SEED} Or load the weights after wrapping, with "
                f"nxdpp.load_pretrained(model, directory)."
            )

    def _check_ties(self, heard: Values, name: Callable[[int], str]) -> None:
        for number, own in self.ties.items():
            first = heard.ties.get(number, own)
            if (first.dtype, first.shape) != (own.dtype, own.shape):
                raise RuntimeError(
                    f"a tied weight is {first.dtype} of {list(first.shape)} on {name(first.rank)} ({first.name}) and "
                    f"{own.dtype} of {list(own.shape)} on {name(own.rank)} ({own.name}). Apply the same change on "
                    f"every rank."
                )
            if first.requires_grad != own.requires_grad:
                frozen, trained = (own, first) if first.requires_grad else (first, own)
                raise RuntimeError(
                    f"a tied weight is frozen on {name(frozen.rank)} ({frozen.name}) and trained on "
                    f"{name(trained.rank)} ({trained.name}): the copies would go apart. Write "
                    f"model.get_parameter({own.name!r}).requires_grad_({first.requires_grad}) on every rank."
                )
            if first.optimizers != own.optimizers:
                raise RuntimeError(
                    f"a tied weight has other options of its optimizer on {name(own.rank)} ({own.name}) than on "
                    f"{name(first.rank)} ({first.name}): the copies would go apart.\n"
                    f"  {name(first.rank)}: {first.optimizers}\n  {name(own.rank)}: {own.optimizers}\n"
                    f"Make the groups of the optimizer by the names of model.named_parameters(), by the same rule on "
                    f"every rank."
                )
            if first.values != own.values:
                raise RuntimeError(
                    f"a tied weight has other values on {name(own.rank)} ({own.name}) than on {name(first.rank)} "
                    f"({first.name}).\n{self._seeds(heard, first.rank, name)}Call move_model_to_device() on every "
                    f"rank: all copies get the values of the first. {_SEED}"
                )

    def _check_conversions(
        self, heard: tuple[int, Conversions] | None, own: Conversions | None, name: Callable[[int], str]
    ) -> None:
        if heard is not None and own is not None and heard[1] != own:
            rank, theirs = heard
            raise RuntimeError(
                f"all weights of {name(self.rank)} {_shown(own)} since it wrapped the model, and those of "
                f"{name(rank)} {_shown(theirs)}. Convert the model on every rank: model.to(dtype) or model.double()."
            )

    def _seeds(self, heard: Values, rank: int, name: Callable[[int], str]) -> str:
        theirs = f"  {name(rank)}: torch.initial_seed() {heard.seeds[rank]} when it wrapped the model\n"
        return f"{theirs}  {name(self.rank)}: torch.initial_seed() {self.initial.seed}\n"


def _shown(conversions: Conversions) -> str:
    changes = " and ".join(f"from {before} to {after}" for before, after in sorted(conversions))
    return f"were converted {changes}" if changes else "were not converted"


def hash_of_all(tensor: torch.Tensor) -> bytes:
    """A hash of all elements of a tensor and their order; none for a subclass that wraps other tensors."""
    if hasattr(tensor, "__tensor_flatten__"):
        return b""
    return digest(str(int(hash_of(readable(tensor.detach())))).encode())


def sample(tensor: torch.Tensor, elements: int = ELEMENTS) -> bytes:
    """A hash of about ``elements`` values of a tensor, 8 bytes; none for a subclass that wraps other tensors."""
    if hasattr(tensor, "__tensor_flatten__"):
        return b""
    tensor = readable(tensor.detach())
    step = max(1, tensor.numel() // max(1, elements))
    if tensor.is_contiguous():
        few = tensor.view(-1)[::step].contiguous()
    else:
        places = torch.arange(0, tensor.numel(), step, device=tensor.device)
        few = tensor[torch.unravel_index(places, tensor.shape)]
    return digest(few.view(torch.uint8).cpu().numpy().data)
