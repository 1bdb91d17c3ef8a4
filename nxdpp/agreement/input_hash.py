"""Hashes of the values of a step's inputs, which are equal on all ranks that are given the same data.

A hash is the sum of a tensor's 64-bit words, each times a fixed random number, modulo 2**64. It needs one pass without
a copy for int64, and it is computed on the tensor's device::

    inputs on the CPU       hash now                     compared in this step
    on another device       hash now, copy to the host   compared in the next step: no wait for the device
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from nxdpp.agreement.fingerprint import digest
from nxdpp.devices.kinds import device_of
from nxdpp.tracing.values.input_dicts import NUMBERS

SLOTS = 12
"""Number of inputs that have a hash of their own in the message. All later inputs share the last hash."""

# 64-bit words that are multiplied at once: the table of random numbers takes 8 MiB at most.
_CHUNK = 2**20
# Elements of a floating tensor that are hashed in each step.
_SAMPLE = 64
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIER = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class InputHashes:
    """Hashes of the inputs that a rank was given.

    ``late_names`` and ``late_values`` are of inputs of the step before on a device other than the CPU.
    """

    names: Sequence[str] = ()
    values: Sequence[int] = ()
    late_names: Sequence[str] = ()
    late_values: Sequence[int] = ()

    def words(self) -> list[int]:
        """The hashes as ``2 * SLOTS`` numbers of 64 bits."""
        return [*_slots(self.values), *_slots(self.late_values)]

    def different(self, theirs: Sequence[int]) -> tuple[list[str], list[str]]:
        """Names of the inputs whose hash is not that in ``theirs``: of this step, and of the step before."""
        ours = self.words()
        differs = [i for i, (own, other) in enumerate(zip(ours, theirs, strict=True)) if own != other]
        now = [name for i in differs if i < SLOTS for name in _named(self.names, i)]
        return now, [name for i in differs if i >= SLOTS for name in _named(self.late_names, i - SLOTS)]


def _named(names: Sequence[str], slot: int) -> Sequence[str]:
    return names[slot:] if slot == SLOTS - 1 else names[slot : slot + 1]


def _slots(values: Sequence[int]) -> list[int]:
    if len(values) < SLOTS:
        return [*values, *[0] * (SLOTS - len(values))]
    rest = 0
    for value in values[SLOTS - 1 :]:
        rest = (rest * _MULTIPLIER + value) % 2**64
    return [*values[: SLOTS - 1], _signed(rest)]


class InputHasher:
    """Hashes the inputs of one pipeline's steps.

    ``check_inputs`` tells when floating tensors are hashed whole: ``"first"`` in the first step of a signature, and a
    sample of them later; ``"always"``; or ``"never"``, not even a sample. Other tensors and numbers are hashed in every
    step.
    """

    def __init__(self, check_inputs: str) -> None:
        self._check_inputs = check_inputs
        self._pending: Callable[[], dict[str, int]] | None = None

    def of_step(self, batches: Sequence[Mapping[str, Any]], is_first: bool) -> InputHashes:
        """Return the hashes of a step, and the hashes that the step before left on a device.

        ``batches`` has inputs by name, of the whole batch or of each microbatch. In the first step of its signature,
        ``is_first``, all hashes are waited for.
        """
        late, self._pending = self._pending, None
        known: dict[str, int] = {}
        on_device: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for name in sorted(batches[0]):
                hashed = self._hash(batches[0][name], is_first)
                if hashed is None:
                    continue
                parts = [part for batch in batches if name in batch for part in _parts(batch[name])]
                made = _joined(map(hashed, parts)) if len(parts) > 1 else hashed(parts[0])
                if isinstance(made, int):
                    known[name] = made
                else:
                    on_device[name] = made
        if on_device:
            started = _started(on_device)
            if is_first:
                known |= started()
            else:
                self._pending = started
        late_values = {} if late is None else late()
        return InputHashes(list(known), list(known.values()), list(late_values), list(late_values.values()))

    def _hash(self, value: Any, is_first: bool) -> Callable[[Any], int | torch.Tensor] | None:
        """Return the function that hashes ``value``; ``None`` for what is not hashed."""
        if isinstance(value, torch.Tensor):
            is_exact = not (value.is_floating_point() or value.is_complex())
            if is_exact or self._check_inputs == "always" or (self._check_inputs == "first" and is_first):
                return hash_of
            return None if self._check_inputs == "never" else _sample_hash
        # Texts, booleans and None are part of the graph.
        return hash_of if isinstance(value, NUMBERS) and not isinstance(value, bool) else None


def _parts(value: Any) -> list[Any]:
    """The tensors of which a sparse, nested or other composed tensor is made; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return [value]
    if hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        return [part for name in names for part in _parts(getattr(value, name))]
    if value.is_nested:
        rows = value.unbind()
        return [[row.shape for row in rows], *rows]
    if value.layout == torch.sparse_coo:
        value = value.coalesce()
        return [value.indices(), value.values()]
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [value.crow_indices(), value.col_indices(), value.values()]
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [value.ccol_indices(), value.row_indices(), value.values()]
    return [value] if value.layout == torch.strided else [value.to_dense()]


def _started(hashes: Mapping[str, torch.Tensor]) -> Callable[[], dict[str, int]]:
    """Start the copy of ``hashes`` from a device to the host; the returned function waits for it, and returns them."""
    names, stacked = list(hashes), torch.stack(list(hashes.values()))
    copied = device_of(stacked.device).to_host(stacked)
    return lambda: dict(zip(names, copied().tolist(), strict=True))


def hash_of(value: Any) -> int | torch.Tensor:
    """A hash of a tensor's values or of a number: 64 bits with a sign; a tensor () where it is on another device."""
    if not isinstance(value, torch.Tensor):
        return int.from_bytes(digest(repr(value).encode()), "little", signed=True)
    words = _words(value)
    table = _table(min(words.numel(), _CHUNK), words.device)
    if words.numel() <= _CHUNK:
        return _dot(words, table)
    return _joined(_dot(part, table) for part in words.split(_CHUNK))


def _sample_hash(value: Any) -> int | torch.Tensor:
    """A hash of about 64 elements of a tensor, evenly spread; of all of what is no tensor."""
    if not isinstance(value, torch.Tensor) or value.numel() <= _SAMPLE:
        return hash_of(value)
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    # Bits of the same size have any strides.
    bits = value.detach().view(_BITS[value.element_size()])
    picked = bits.take(_places(value.numel(), value.shape[-1], value.device)).to(torch.int64)
    return _dot(picked, _table(picked.numel(), value.device))


@functools.lru_cache(maxsize=256)
def _places(size: int, last: int, device: torch.device) -> torch.Tensor:
    """The places of the sampled elements among ``size``, in rows of ``last``."""
    distance = size // _SAMPLE
    # A multiple of the last size would take one column.
    while math.gcd(distance, last) > 1:
        distance -= 1
    return torch.arange(0, size, distance, device=device)


def _joined(hashes: Iterable[int | torch.Tensor]) -> int | torch.Tensor:
    total: int | torch.Tensor = 0
    for each in hashes:
        if isinstance(total, int) and isinstance(each, int):
            total = _signed(total * _MULTIPLIER + each)
        else:
            total = total * _signed(_MULTIPLIER) + each
    return total


def _dot(words: torch.Tensor, table: torch.Tensor) -> int | torch.Tensor:
    table = table[: words.numel()]
    return int(torch.dot(words, table)) if words.is_cpu else (words * table).sum()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as int64 (n,), filled up with zeros."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.contiguous().view(-1)
    if flat.dtype == torch.int64:
        return flat
    length = flat.numel() * flat.element_size()
    raw = flat.view(torch.uint8)
    if length % 8 or (flat.storage_offset() * flat.element_size()) % 8:
        filled = raw.new_zeros(-(-length // 8) * 8)
        filled[:length] = raw
        raw = filled
    return raw.view(torch.int64)


_tables: dict[torch.device, torch.Tensor] = {}


def _table(length: int, device: torch.device) -> torch.Tensor:
    """At least ``length`` fixed random numbers, int64, equal on all ranks (the SplitMix64 sequence)."""
    known = _tables.get(device)
    if known is None or known.numel() < length:
        numbers = numpy.arange(1, max(1024, 2 ** (length - 1).bit_length()) + 1, dtype=numpy.uint64)
        numbers *= numpy.uint64(_MULTIPLIER)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            numbers = (numbers ^ (numbers >> numpy.uint64(shift))) * numpy.uint64(factor)
        numbers ^= numbers >> numpy.uint64(31)
        # An odd factor keeps a difference of any single word.
        known = device_of(device).from_host(torch.from_numpy((numbers | numpy.uint64(1)).view(numpy.int64)))
        _tables[device] = known
    return known


def _signed(value: int) -> int:
    """``value`` modulo 2**64, as a number of 64 bits with a sign."""
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value
