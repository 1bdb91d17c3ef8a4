"""Builds a module without memory for its parameters and buffers, and knows how to make each of them later."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from nxdpp.initialization.as_if_on_cpu import AsIfOnCpu
from nxdpp.initialization.init_on_device import is_on_meta
from nxdpp.initialization.plain_attributes import materialise_plain_attributes
from nxdpp.initialization.record import ConstructorRecord, remember
from nxdpp.initialization.recorder import ConstructorRecorder, is_recording
from nxdpp.initialization.tape import Tape

M = TypeVar("M", bound=nn.Module)


def deferred_init(constructor: Callable[..., M], *args: Any, **kwargs: Any) -> M:
    """``constructor(*args, **kwargs)`` without memory: parameters and buffers are plain ones on the meta device.

    How each is made is recorded, so that ``NxDPPModel`` makes the local ones, and only those. They are bit for bit
    what the constructor itself would have made at this place under the same state of torch's generator, whichever
    of them are made and in whatever order, and the generator is left as the constructor leaves it. Ties, classes and
    attributes of parameters are kept.

    The constructor sees CPU tensors. Where it asks for a value (``.item()``, ``.tolist()``, ``.numpy()``, ``if``, an
    index by a mask), that one is computed then. A tensor that is an attribute of a module, also within lists, tuples
    and dictionaries, and neither a parameter nor a buffer nor a part of one, nor requires a gradient, has its values
    when this returns. So has a parameter that is itself a tensor from outside; tensors from outside that others are
    computed from are copied.

    Time: the generator is moved over the constructor's uniform and normal numbers without drawing them, in some 3 ms
    for a large tensor; other random numbers (exponential, permutations) are drawn, one tensor at a time in memory.
    Memory: 5 kB for each random operation that counts, and what was given by value.

    What differs from the eager constructor:

    - Elements that it leaves undefined (``torch.empty``) are zero.
    - ``.numpy()`` is a read-only copy.
    - Parameters that are views of one storage, and not the same object, no longer share memory once made.
    - A matrix product or decomposition rounds as with the number of threads set when the tensor is made.
    - ``type()`` of a tensor, ``isinstance(x, torch.FloatTensor)`` and ``torch.nn.init``'s own code see meta tensors.
    - What is done to the module afterwards is not recorded: ``.half()`` or ``nn.init.zeros_(parameter)`` belong into
      the constructor, and are an error when values are asked for. Not noticed is what is written through ``.data``.
      A copy of the module (``copy.deepcopy``) is a plain model on the meta device.
    - Tensors that only a closure or an object of another kind holds stay on the meta device.

    Not collective. Inside a constructor that is being recorded it just calls ``constructor``.

    Raises:
        TypeError: where ``constructor`` is not callable, or returns no module.
        ValueError: inside ``init_on_device``, ``torch.device`` contexts and with another default device than the CPU.
        RuntimeError: where the constructor makes tensors on another device than the CPU (those on the meta device
            stay what they are), sparse ones, or uses ``data_ptr()``, ``pin_memory()``, ``share_memory_()`` or
            pickling on a tensor that has no memory.
    """
    if not callable(constructor):
        raise TypeError(
            f"constructor must be a class or function that returns a module, not {constructor!r}: "
            f"deferred_init(LlamaForCausalLM, config)"
        )
    if is_recording():
        return constructor(*args, **kwargs)
    _check_surroundings()
    seed, state = torch.initial_seed(), torch.get_rng_state()
    tape = Tape()
    recorder = ConstructorRecorder(tape)
    with recorder, AsIfOnCpu(recorder):
        module = constructor(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise TypeError(f"{constructor!r} returned a {type(module).__name__}, not a torch.nn.Module")
    materialise_plain_attributes(module, recorder)
    tape.forget_the_dead()
    remember(ConstructorRecord(tape, seed, state), module)
    return module


def _check_surroundings() -> None:
    if is_on_meta() or torch.get_default_device().type != "cpu":
        raise ValueError(
            "deferred_init must be called outside of init_on_device and torch.device contexts, with the CPU as the "
            "default device: it allocates nothing by itself"
        )
