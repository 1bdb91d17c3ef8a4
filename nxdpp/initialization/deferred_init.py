"""Construction of a module without memory, from which each tensor can be materialised later.

``deferred_init`` runs the constructor on meta tensors and records its tensor operations on a tape. To
materialise a tensor, the operations that it depends on run again, from the generator state of that time::

    constructor       weight.normal_()                       bias.zero_()
    tape              0: normal_(weight), generator state    1: zero_(bias)
    materialise       weight: replay 0                       bias: replay 1

The generator advances as if the numbers were drawn. So each tensor equals the eager constructor's bit for bit, on any
rank and in any order.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from nxdpp.ground.torch_names import REGISTRIES, pytree
from nxdpp.initialization.as_if_on_cpu import AsIfOnCpu
from nxdpp.initialization.init_on_device import is_on_meta
from nxdpp.initialization.record import ConstructorRecord, remember
from nxdpp.initialization.recorder import ConstructorRecorder, is_recording
from nxdpp.initialization.tape import Tape

M = TypeVar("M", bound=nn.Module)


def deferred_init(constructor: Callable[..., M], *args: Any, **kwargs: Any) -> M:
    """Call ``constructor(*args, **kwargs)`` without memory for its parameters and buffers; not collective.

    Parameters and buffers are on the meta device, with the constructor's classes, attributes and ties. ``NxDPPModel``
    materialises the tensors of its rank, bit for bit as the eager constructor makes them. The state of torch's
    generator is then the same as after the eager constructor.

    The constructor sees CPU tensors. A value that it asks for (``.item()``, ``.tolist()``, ``.numpy()``, ``if``, an
    index by a mask) is computed at once. Tensors in plain attributes of a module, also in lists, tuples and
    dictionaries, are materialised before the function returns, except parts of parameters or buffers, and tensors
    that require a gradient. Tensors from outside that an operation reads are copied.

    Time: a large uniform or normal tensor takes about 3 ms, because the generator jumps over its numbers. Other random
    numbers (exponential, permutations) are drawn, one tensor at a time. Memory: 5 kB for each recorded random
    operation, and the copies of tensors from outside.

    Differences from the eager constructor:

    - Elements that it leaves undefined (``torch.empty``) are zero.
    - ``.numpy()`` returns a read-only copy.
    - Different parameters that are views of one storage no longer share memory once materialised.
    - A matrix product or decomposition is computed with the number of threads at the time of the replay.
    - ``type()`` of a tensor, ``isinstance(x, torch.FloatTensor)`` and the code of ``torch.nn.init`` see meta tensors.
    - Later changes of the module (``.half()``, ``nn.init.zeros_(parameter)``) are not recorded. They are an error when
      the module is materialised. Writes through ``.data`` are not noticed: make them in the constructor.
    - A copy of the module (``copy.deepcopy``) is a plain model on the meta device.
    - Tensors that only a closure or an object of another kind refers to stay on the meta device.

    Inside a constructor that is already recorded it only calls ``constructor``.

    Raises:
        TypeError: if ``constructor`` is not callable or does not return a module.
        ValueError: inside ``init_on_device`` or a ``torch.device`` context, or with a default device other than CPU.
        RuntimeError: if the constructor makes tensors that are sparse or on a device other than CPU and meta; if it
            pickles a deferred tensor, or calls its ``data_ptr()``, ``pin_memory()`` or ``share_memory_()``.
    """
    if not callable(constructor):
        raise TypeError(
            f"constructor must be a class or function that returns a module, not {constructor!r}: "
            f"deferred_init(LlamaForCausalLM, config)"
        )
    if is_recording():
        return constructor(*args, **kwargs)
    if is_on_meta() or torch.get_default_device().type != "cpu":
        raise ValueError(
            "deferred_init must be called outside of init_on_device and torch.device contexts, with the CPU as the "
            "default device: it allocates no memory by itself"
        )
    seed, state = torch.initial_seed(), torch.get_rng_state()
    tape = Tape()
    recorder = ConstructorRecorder(tape)
    with recorder, AsIfOnCpu(recorder):
        module = constructor(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise TypeError(f"{constructor!r} returned a {type(module).__name__}, not a torch.nn.Module")
    _materialise_plain_attributes(module, recorder)
    tape.drop_unreachable()
    remember(ConstructorRecord(tape, seed, state), module)
    return module


def _materialise_plain_attributes(root: nn.Module, recorder: ConstructorRecorder) -> None:
    """Materialise the deferred tensors in plain attributes of the modules: no later step would do it.

    Tensors in the storage of a parameter or buffer are left out. So are tensors that require a gradient: each forward
    computes them.
    """
    registered = [*nn.Module.parameters(root), *nn.Module.buffers(root)]
    shared = {recorder.tape.number_of(tensor) for tensor in registered if recorder.knows(tensor)}
    made: dict[int, torch.Tensor] = {}

    def is_plain(leaf: Any) -> bool:
        return (
            isinstance(leaf, torch.Tensor)
            and recorder.knows(leaf)
            and not leaf.requires_grad
            and recorder.tape.number_of(leaf) not in shared
        )

    def with_value(leaf: Any) -> Any:
        if not is_plain(leaf):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = recorder.value(leaf)
        return made[id(leaf)]

    for module in root.modules():
        for name, attribute in vars(module).items():
            if name not in REGISTRIES and any(map(is_plain, pytree.tree_leaves(attribute))):
                vars(module)[name] = pytree.tree_map(with_value, attribute)
