"""Dispatch mode that runs a constructor's tensor operations on meta tensors and records them on a tape."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from nxdpp.initialization import random_draws, replay
from nxdpp.initialization.tape import Draw, Generator, Step, Tape, View
from nxdpp.initialization.written_tensors import written_tensors

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
# Operations that give a tensor another storage and change no content.
_REBINDING = {aten.set_}


class ConstructorRecorder(TorchDispatchMode):
    """Records operations; each new CPU tensor becomes a deferred tensor, a meta tensor with a number on the tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape
        self.leave_meta_alone = False

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a deferred tensor of this recorder."""
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
        deferred: torch.Tensor = self._record(aten.clone.default, (real.detach(),), {})
        return deferred

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            return self._run(function, arguments, keywords or {})

    def _run(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, torch.Tensor)]
        known = [tensor for tensor in tensors if self.knows(tensor)]
        _check_devices(function, tensors, known, keywords)
        if function is aten.lift_fresh.default and not known and not self.leave_meta_alone:
            return self.deferred(tensors[0])
        if not known and not self._makes_deferred(function, tensors, keywords):
            return function(*arguments, **keywords)
        if _gives_no_tensors(function) or any(
            not self.knows(tensor) for tensor in written_tensors(function, arguments, keywords)
        ):
            return function(*self._valued(arguments), **self._valued(keywords))
        return self._record(function, arguments, keywords)

    def _makes_deferred(self, function: Any, tensors: list[torch.Tensor], keywords: dict[str, Any]) -> bool:
        """Whether a function without deferred arguments makes a deferred tensor."""
        device = keywords.get("device")
        if not _has_device(function) or self.leave_meta_alone:
            return False
        if tensors:
            return device is not None and device.type == "meta" and not any(tensor.is_meta for tensor in tensors)
        return True

    def _record(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Run ``function`` on the meta device, and record a step if it creates or changes content."""
        changed = written_tensors(function, arguments, keywords)
        draw = _draw(arguments, keywords) if random_draws.is_random(function) else None
        kept_arguments, kept_keywords = tree_map(self._kept, (arguments, _on(function, "cpu", keywords)))
        overwrites = self._overwrites(function, arguments, keywords)
        results = self._results(function, arguments, keywords, changed, draw)
        leaves = tree_leaves(results)
        creates: list[tuple[int, View]] = []
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and self.tape.number_of(leaf) is None:
                self.tape.add_storage(leaf)
                creates.append((place, self.tape.view(leaf)))
        changes = frozenset(self._number(tensor) for tensor in changed)
        if function.overloadpacket in _UNWRITTEN | _REBINDING or not (creates or changes):
            return results
        self.tape.append(
            Step(
                function,
                kept_arguments,
                kept_keywords,
                tuple(creates),
                changes,
                overwrites,
                draw,
                torch.get_default_dtype(),
            )
        )
        return results

    def _number(self, tensor: torch.Tensor) -> int:
        number = self.tape.number_of(tensor)
        assert number is not None
        return number

    def _results(
        self,
        function: Any,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        changed: list[torch.Tensor],
        draw: Draw | None,
    ) -> Any:
        """Result of ``function`` on meta tensors; its generator advances as if the numbers were drawn."""
        keywords_on_meta = _on(function, "meta", tree_map(_without_memory, keywords))
        try:
            results = function(*tree_map(_without_memory, arguments), **keywords_on_meta)
        except (NotImplementedError, RuntimeError):
            # The shape of the result may depend on values: then the function runs once with memory.
            return self._results_of_values(function, arguments, keywords, changed)
        if draw is not None:
            self._advance(function, arguments, keywords, results)
        return results

    def _results_of_values(
        self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], changed: list[torch.Tensor]
    ) -> Any:
        results = function(*self._valued(arguments), **_on(function, "cpu", self._valued(keywords)))
        flat, structure = tree_flatten(results)
        if changed:
            assert len(flat) <= len(changed), f"{function} both changes and makes tensors"
            return tree_unflatten(changed[: len(flat)], structure)
        return tree_map(_without_memory, results)

    def _advance(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], results: Any) -> None:
        generators = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, torch.Generator)]
        generator = generators[0] if generators else torch.default_generator
        if isinstance(results, torch.Tensor) and random_draws.can_skip(function, results):
            random_draws.skip(function, results, generator)
            return
        if function.overloadpacket in _OVERWRITING:
            first = torch.empty_like(arguments[0], device="cpu")
            arguments = (first, *arguments[1:])
        function(*self._valued(arguments), **_on(function, "cpu", self._valued(keywords)))

    def _valued(self, tree: Any) -> Any:
        """``tree`` with CPU tensors in place of the deferred tensors."""
        return tree_map(
            lambda leaf: self.value(leaf) if isinstance(leaf, torch.Tensor) and self.knows(leaf) else leaf, tree
        )

    def _kept(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator):
            return Generator()
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return self.tape.view(leaf) if self.knows(leaf) else leaf.detach().clone()

    def _overwrites(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> frozenset[int]:
        if function.overloadpacket not in _OVERWRITING:
            return frozenset()
        changed, *others = arguments
        view = self.tape.view(changed)
        covers = changed.numel() * changed.element_size() == self.tape.nbytes(view.storage)
        read = [leaf for leaf in tree_leaves((others, keywords)) if isinstance(leaf, torch.Tensor)]
        reads_itself = any(self.tape.number_of(tensor) == view.storage for tensor in read)
        overlaps = torch._debug_has_internal_overlap(changed) == 1
        return frozenset([view.storage]) if covers and not reads_itself and not overlaps else frozenset()


def is_recording() -> bool:
    """Whether this thread is inside a constructor that ``deferred_init`` records."""
    return any(isinstance(mode, ConstructorRecorder) for mode in _get_current_dispatch_mode_stack())


def _gives_no_tensors(function: Any) -> bool:
    """Whether ``function`` returns numbers or booleans only."""
    returns = function._schema.returns
    return bool(returns) and not any("Tensor" in str(one.type) for one in returns)


def _draw(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Draw:
    generators = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, torch.Generator)]
    generator = generators[0] if generators else torch.default_generator
    return Draw(generator.get_state(), default=generator is torch.default_generator)


def _without_memory(leaf: Any) -> Any:
    if isinstance(leaf, torch.Generator):
        return None
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf


def _has_device(function: Any) -> bool:
    return any(argument.name == "device" for argument in function._schema.arguments)


def _on(function: Any, device: str, keywords: dict[str, Any]) -> dict[str, Any]:
    """``keywords`` with the device, if ``function`` has this argument, and without pinned memory."""
    if not _has_device(function):
        return keywords
    unpinned = {"pin_memory": False} if keywords.get("pin_memory") else {}
    return {**keywords, **unpinned, "device": torch.device(device)}


def check_device(device: Any, function: Any) -> None:
    """Raise ``RuntimeError`` for a call of ``function`` with a device other than CPU and meta."""
    if device is not None and torch.device(device).type not in ("cpu", "meta"):
        raise RuntimeError(
            f"deferred_init: the constructor calls {function} for device {device}, but only tensors on the CPU can be "
            f"deferred: build on the CPU and move the model afterwards"
        )


def _check_devices(
    function: Any, tensors: list[torch.Tensor], known: list[torch.Tensor], keywords: dict[str, Any]
) -> None:
    """Raise ``RuntimeError`` for an operation that cannot be recorded."""
    check_device(keywords.get("device"), function)
    if keywords.get("layout") not in (None, torch.strided):
        raise RuntimeError(
            f"deferred_init: the constructor calls {function} for layout {keywords['layout']}, but only strided "
            f"tensors can be deferred: make it without deferred_init"
        )
    foreign = [tensor for tensor in tensors if tensor.device.type != "cpu" and not any(tensor is one for one in known)]
    if known and foreign:
        raise RuntimeError(
            f"deferred_init: the constructor calls {function} with tensors on {foreign[0].device} and on the CPU: "
            f"make all of them on the CPU"
        )
    if any(tensor.is_conj() or tensor.is_neg() for tensor in known):
        raise RuntimeError(
            f"deferred_init: the constructor calls {function} with a lazily conjugated or negated tensor: "
            f"add .resolve_conj() or .resolve_neg()"
        )
