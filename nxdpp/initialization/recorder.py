"""Dispatch mode that runs a constructor's tensor operations on meta tensors and records them on a tape."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from nxdpp.ground.torch_names import NO_TORCH_FUNCTION, SCHEMA, pytree
from nxdpp.initialization import mersenne_twister, replay
from nxdpp.initialization.tape import (
    Draw,
    EnteredMode,
    Generator,
    Operation,
    Tape,
    View,
    overlaps_itself,
    written_tensors,
)

aten = torch.ops.aten

# Operations that create a storage and write nothing to it.
_UNWRITTEN = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
# Operations that write all elements of their first argument and do not read it.
_OVERWRITING = {
    aten.zero_,
    aten.fill_,
    aten.copy_,
    aten.normal_,
    aten.uniform_,
    aten.random_,
    aten.exponential_,
    aten.cauchy_,
    aten.log_normal_,
    aten.geometric_,
    aten.bernoulli_,
}
# Operations that give a tensor a different storage and change no content.
_REBINDING = {aten.set_}


@dataclass(frozen=True)
class _Call:
    """A call of an operator."""

    function: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]

    @cached_property
    def changed(self) -> list[torch.Tensor]:
        """The tensors that the operator writes to."""
        return written_tensors(self.function, self.arguments, self.keywords)

    @property
    def generator(self) -> torch.Generator:
        generators = (leaf for leaf in self._leaves if isinstance(leaf, torch.Generator))
        return next(generators, torch.default_generator)

    @property
    def takes_device(self) -> bool:
        return any(argument.name == "device" for argument in SCHEMA.of(self.function).arguments)

    @property
    def returns_no_tensors(self) -> bool:
        """Return whether the operator returns numbers or booleans only."""
        returns = SCHEMA.of(self.function).returns
        return bool(returns) and not any("Tensor" in str(one.type) for one in returns)

    def with_leaves(self, change: Callable[[Any], Any]) -> "_Call":
        """The call with ``change`` applied to each leaf of its arguments."""
        return _Call(self.function, *pytree.tree_map(change, (self.arguments, self.keywords)))

    def on(self, device: str) -> "_Call":
        """The call on ``device``, if the operator takes one, without pinned memory."""
        if not self.takes_device:
            return self
        unpinned = {"pin_memory": False} if self.keywords.get("pin_memory") else {}
        return _Call(self.function, self.arguments, {**self.keywords, **unpinned, "device": torch.device(device)})

    def run(self) -> Any:
        return self.function(*self.arguments, **self.keywords)

    @cached_property
    def _leaves(self) -> list[Any]:
        return pytree.tree_leaves((self.arguments, self.keywords))


class ConstructorRecorder(EnteredMode):
    """Records operations; each new CPU tensor becomes a deferred tensor, a meta tensor with a number on the tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape
        self.leave_meta_alone = False

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is a deferred tensor of this recorder."""
        return tensor.is_meta and self.tape.number_of(tensor) is not None

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """The present content of the deferred ``tensor``, on the CPU."""
        return replay.compute(self.tape, self.tape.view(tensor))

    def deferred(self, real: torch.Tensor) -> torch.Tensor:
        """A deferred tensor with the present content of the CPU tensor ``real``, which is copied."""
        if real.is_meta:
            raise RuntimeError(
                f"deferred_init: the constructor makes a tensor of shape {tuple(real.shape)} whose values are lost, "
                f"because torch puts them on the meta device: make it with torch.tensor"
            )
        deferred: torch.Tensor = self._record(_Call(aten.clone.default, (real.detach(),), {}))
        return deferred

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        with NO_TORCH_FUNCTION():
            return self._dispatch(_Call(function, arguments, keywords or {}))

    def _dispatch(self, call: _Call) -> Any:
        known = [tensor for tensor in call.tensors if self.knows(tensor)]
        _check_recordable(call, known)
        if call.function is aten.lift_fresh.default and not known and not self.leave_meta_alone:
            return self.deferred(call.tensors[0])
        if not known and not self._makes_deferred(call):
            return call.run()
        if call.returns_no_tensors or not all(map(self.knows, call.changed)):
            return call.with_leaves(self._valued).run()
        return self._record(call)

    def _makes_deferred(self, call: _Call) -> bool:
        """Return whether a call without deferred arguments makes a deferred tensor."""
        if not call.takes_device or self.leave_meta_alone:
            return False
        device = call.keywords.get("device")
        moves_to_meta = device is not None and device.type == "meta" and not any(one.is_meta for one in call.tensors)
        return moves_to_meta or not call.tensors

    def _record(self, call: _Call) -> Any:
        """Run the call on the meta device, and record it if it creates or changes content."""
        # State before the call.
        generator = call.generator
        draw = None
        if mersenne_twister.is_random(call.function):
            draw = Draw(generator.get_state(), default=generator is torch.default_generator)
        kept = call.on("cpu").with_leaves(self._kept)
        overwrites = self._overwrites(call)

        results = self._results(call)

        # State after the call.
        creates: list[tuple[int, View]] = []
        for place, leaf in enumerate(pytree.tree_leaves(results)):
            if isinstance(leaf, torch.Tensor) and self.tape.number_of(leaf) is None:
                self.tape.add_storage(leaf)
                creates.append((place, self.tape.view(leaf)))
        changes = frozenset(self.tape.view(tensor).storage for tensor in call.changed)
        if call.function.overloadpacket not in _UNWRITTEN | _REBINDING and (creates or changes):
            dtype = torch.get_default_dtype()
            self.tape.append(
                Operation(
                    kept.function, kept.arguments, kept.keywords, tuple(creates), changes, overwrites, draw, dtype
                )
            )
        return results

    def _results(self, call: _Call) -> Any:
        """Results of the call on meta tensors; its generator advances as if the numbers were drawn."""
        try:
            results = call.with_leaves(_without_memory).on("meta").run()
        except (NotImplementedError, RuntimeError):
            # The shape of the result may depend on values: then the call runs once with memory.
            return self._results_of_values(call)
        if mersenne_twister.is_random(call.function):
            self._advance(call, results)
        return results

    def _results_of_values(self, call: _Call) -> Any:
        results = call.with_leaves(self._valued).on("cpu").run()
        flat, structure = pytree.tree_flatten(results)
        if call.changed:
            assert len(flat) <= len(call.changed), f"{call.function} both changes and makes tensors"
            return pytree.tree_unflatten(call.changed[: len(flat)], structure)
        return pytree.tree_map(_without_memory, results)

    def _advance(self, call: _Call, results: Any) -> None:
        if isinstance(results, torch.Tensor) and mersenne_twister.can_skip(call.function, results):
            mersenne_twister.skip(call.function, results, call.generator)
            return
        if call.function.overloadpacket in _OVERWRITING:
            # The first argument is only written: its content need not be computed.
            first = torch.empty_like(call.arguments[0], device="cpu")
            call = _Call(call.function, (first, *call.arguments[1:]), call.keywords)
        call.with_leaves(self._valued).on("cpu").run()

    def _valued(self, leaf: Any) -> Any:
        return self.value(leaf) if isinstance(leaf, torch.Tensor) and self.knows(leaf) else leaf

    def _kept(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator):
            return Generator()
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return self.tape.view(leaf) if self.knows(leaf) else leaf.detach().clone()

    def _overwrites(self, call: _Call) -> frozenset[int]:
        """The storage of the first argument, if all of its content is overwritten and not read."""
        if call.function.overloadpacket not in _OVERWRITING:
            return frozenset()
        changed, *others = call.arguments
        storage = self.tape.view(changed).storage
        covers = changed.numel() * changed.element_size() == self.tape.nbytes(storage)
        read = [leaf for leaf in pytree.tree_leaves((others, call.keywords)) if isinstance(leaf, torch.Tensor)]
        reads_itself = any(self.tape.number_of(tensor) == storage for tensor in read)
        overlaps = overlaps_itself(changed)
        return frozenset([storage]) if covers and not reads_itself and not overlaps else frozenset()


def is_recording() -> bool:
    """Return whether this thread is inside a constructor that ``deferred_init`` records."""
    return bool(ConstructorRecorder.entered())


def _without_memory(leaf: Any) -> Any:
    if isinstance(leaf, torch.Generator):
        return None
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf


def check_device(device: Any, function: Any) -> None:
    """Raise ``RuntimeError`` for a call of ``function`` with a device other than CPU and meta."""
    if device is not None and torch.device(device).type not in ("cpu", "meta"):
        raise RuntimeError(
            f"deferred_init: the constructor calls {function} for device {device}, but only tensors on the CPU can be "
            f"deferred: build on the CPU and move the model afterwards"
        )


def _check_recordable(call: _Call, known: list[torch.Tensor]) -> None:
    """Raise ``RuntimeError`` for a call that cannot be recorded; ``known`` are its deferred tensors."""
    prefix = f"deferred_init: the constructor calls {call.function}"
    check_device(call.keywords.get("device"), call.function)
    if call.keywords.get("layout") not in (None, torch.strided):
        raise RuntimeError(
            f"{prefix} for layout {call.keywords['layout']}, but only strided tensors can be deferred: make it without "
            f"deferred_init"
        )
    foreign = [one for one in call.tensors if one.device.type != "cpu" and not any(one is other for other in known)]
    if known and foreign:
        raise RuntimeError(f"{prefix} with tensors on {foreign[0].device} and on the CPU: make all of them on the CPU")
    if any(tensor.is_conj() or tensor.is_neg() for tensor in known):
        raise RuntimeError(
            f"{prefix} with a lazily conjugated or negated tensor: add .resolve_conj() or .resolve_neg()"
        )
