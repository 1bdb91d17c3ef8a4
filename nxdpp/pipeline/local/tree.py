"""The tree of a rank: its modules under their original names. Other parameters of the model are freed."""

from collections.abc import Collection

import torch
from torch import nn

from nxdpp.ground.torch_names import BUFFERS, MODULES, NON_PERSISTENT, PARAMETERS
from nxdpp.pipeline.local.elsewhere_tensors import ElsewhereTensor, buffer_elsewhere, is_freed, parameter_elsewhere
from nxdpp.pipeline.local.local_module import LocalModule
from nxdpp.pipeline.local.own_save import refuse_own_state
from nxdpp.pipeline.partition.assignment import Owners
from nxdpp.tracing.modules import listings

# Note: two trees of a rank
#
# The graphs of a rank's stages run the modules of the user's model. Code of the user and of optimizers, checkpoints and
# `.to()` asks the same model for all it has, and must not meet what other ranks hold. One tree cannot do both:
#
#     root (graphs, code above layers)           local_module (listings, .to, state dicts, optimizers)
#     model                                      LocalModule
#     ├─ embed      on rank 0: meta here         ├─ (left out)
#     ├─ layers     ModuleList of all            ├─ layers    a container
#     │  ├─ 0, 1    meta here                    │
#     │  └─ 2, 3 ─────────── the same objects ───┼── 2, 3
#     └─ head ────────────── the same object ────┴─ head
#
# Modules of this rank are the same objects under the same names in both, so a hook, a replaced weight or a mode that is
# set in one is there in the other. What is above layers is a container of our own in the second tree: an empty module
# with its local tensors. A call of it raises, and says what to do.
#
# In the first tree parameters of other ranks are on the meta device, of classes that refuse to be read, saved or
# pickled with its name (`elsewhere_tensors`). They stay there, because the code above layers is traced with the whole
# model: it asks for shapes, and each rank must see the same graph. Ties stay one object, as in the model.
#
# Rejected: the whole model with filtered names. `.to`, `load_state_dict`, `_apply` and optimizers walk modules by
# torch's private attributes, and met parameters that were freed.
#
# Modules without parameters are in every rank's tree: each rank computes what depends on inputs alone. A buffer that a
# forward changes is the exception: it has owners as a parameter has, and is left out elsewhere.


def local_names(owners: Owners, rank: int) -> set[str]:
    """Names of the parameters, and of the changing buffers, that ``rank`` holds."""
    return {name for name, ranks in owners.items() if rank in ranks}


def names_elsewhere(owners: Owners, rank: int) -> set[str]:
    """Names of the parameters, and of the changing buffers, that only other ranks hold."""
    return {name for name, ranks in owners.items() if rank not in ranks}


def tied_names(root: nn.Module, owners: Owners) -> list[tuple[list[str], list[int]]]:
    """The names and the ranks of each parameter that several ranks hold.

    Ties are found by identity: one parameter under several names, or one module that several ranks use.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in listings.named_parameters(root, remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    tied = [(group, sorted(set().union(*(owners[name] for name in group)))) for group in names.values()]
    return [(group, ranks) for group, ranks in tied if len(ranks) > 1]


def with_tied_names(root: nn.Module, owners: Owners) -> Owners:
    """Return ``owners`` with all names of a tied parameter on each rank that holds it.

    So what is done to one of its names, or to a module that has it, is done to each copy.
    """
    ranks_of = {name: set(ranks) for names, ranks in tied_names(root, owners) for name in names}
    return {name: ranks_of.get(name, ranks) for name, ranks in owners.items()}


def shared_names(root: nn.Module) -> list[list[str]]:
    """The names of each parameter, and of each buffer, that has several."""
    names: dict[torch.Tensor, list[str]] = {}
    for named in (listings.named_parameters, listings.named_buffers):
        for name, tensor in named(root, remove_duplicate=False):
            names.setdefault(tensor, []).append(name)
    return [group for group in names.values() if len(group) > 1]


def new_tie(root: nn.Module, owners: Owners) -> list[str]:
    """The names of a parameter that were parameters of different ranks; empty for none.

    A new name (``head.base.weight``) is of the ranks that hold the module in whose place it is (``head``).
    """
    parameters = {name for name, _ in listings.named_parameters(root, remove_duplicate=False)}
    for names in shared_names(root):
        ranks = [owners.get(name) or (_ranks_around(name, owners) if name in parameters else set()) for name in names]
        if len(set(map(frozenset, filter(None, ranks)))) > 1:
            return names
    return []


def _ranks_around(name: str, owners: Owners) -> set[int]:
    place = name.rpartition(".")[0]
    if not place:
        return set()
    inside = [ranks for each, ranks in owners.items() if each.startswith(f"{place}.")]
    return set().union(*inside) if inside else _ranks_around(place, owners)


def build_local_module(
    root: nn.Module, local: Collection[str], layers: Collection[str], elsewhere: Collection[str] = ()
) -> LocalModule:
    """Build the tree of the modules of ``root`` whose parameters are ``local``, under their original names.

    The tree has the same module and parameter objects as ``root``. Modules above ``layers``, and modules with
    parameters of several ranks, are replaced by containers. These are empty modules with their own local tensors.

    Modules without parameters are in every rank's tree, because every rank computes what depends only on the inputs.
    Modules whose forward changes a buffer are an exception: where that buffer is ``elsewhere``, they are left out.
    """
    container = LocalModule()
    container.train(root.training)
    _fill(container, root, "", _Ownership(local, elsewhere), layers)
    return container


def names_of_module(module: nn.Module, name: str, local: Collection[str]) -> nn.Module:
    """Return the tree of ``module`` called ``name``, with its ``local`` parameters; free the others in ``module``."""
    whole, above = nn.Module(), nn.Module()
    whole.add_module("at", module)
    places = {f"at{place[len(name) :]}" for place in local}
    free_others(whole, places, called=("at", name))
    _fill(above, whole, "", _Ownership(places, ()), ())
    return above.get_submodule("at")


def follow_training_modes(local_module: nn.Module, root: nn.Module, mode: bool) -> None:
    """Give each module of ``local_module`` the training mode of the module of ``root`` with its name.

    A module whose name ``root`` does not have gets ``mode``.
    """
    modules = dict(listings.named_modules(root, remove_duplicate=False))
    for name, module in listings.named_modules(local_module):
        module.training = modules[name].training if name in modules else mode


def check_not_freed(root: nn.Module, local: Collection[str]) -> None:
    """Raise ``ValueError`` where an earlier ``free_others`` freed a parameter that is now ``local``."""
    for name, parameter in listings.named_parameters(root, remove_duplicate=False):
        if name in local and is_freed(parameter):
            raise ValueError(
                f"{name} had values, which were freed when this {type(root).__name__} was wrapped before, for another "
                f"rank or with other cuts. Build the model again for each pipeline."
            )


def free_others(
    root: nn.Module, local: Collection[str], elsewhere: Collection[str] = (), called: tuple[str, str] = ("", "")
) -> None:
    """Move the parameters of ``root`` that are not ``local`` to the meta device.

    Buffers that are ``elsewhere`` and buffers of modules of other ranks are moved, too. Ties are kept. A state dict or
    a pickle with one of the moved tensors is refused from now on. Its message replaces the first name in ``called`` by
    the second.
    """
    ownership = _Ownership(local, elsewhere)
    replaced: dict[int, nn.Parameter] = {}
    # A module that occurs in several places of the model stays here if one of them is local.
    prefixes: dict[nn.Module, list[str]] = {}
    for prefix, module in listings.named_modules(root, remove_duplicate=False):
        prefixes.setdefault(module, []).append(prefix)
    for module, places in prefixes.items():
        freed: list[str] = []
        for key, parameter in PARAMETERS.of(module).items():
            if parameter is None or isinstance(parameter, ElsewhereTensor):
                continue
            if not any(_join(prefix, key) in local for prefix in places):
                meta = parameter_elsewhere(parameter, _join(places[0], key).replace(*called, 1))
                PARAMETERS.of(module)[key] = replaced.setdefault(id(parameter), meta)
                freed.append(key)
        for key, buffer in BUFFERS.of(module).items():
            if buffer is None or isinstance(buffer, ElsewhereTensor):
                continue
            if all(ownership.buffer_is_elsewhere(module, prefix, key) for prefix in places):
                BUFFERS.of(module)[key] = buffer_elsewhere(buffer, _join(places[0], key).replace(*called, 1))
                freed += [key] if key not in NON_PERSISTENT.of(module) else []
        if freed:
            refuse_own_state(module, freed[0])


def _fill(
    container: nn.Module, module: nn.Module, prefix: str, ownership: "_Ownership", layers: Collection[str]
) -> None:
    for key, parameter in PARAMETERS.of(module).items():
        if parameter is not None and _join(prefix, key) in ownership.local:
            container.register_parameter(key, parameter)
    for key, buffer in BUFFERS.of(module).items():
        if buffer is not None and not ownership.buffer_is_elsewhere(module, prefix, key):
            container.register_buffer(key, buffer, persistent=key not in NON_PERSISTENT.of(module))
    for key, child in MODULES.of(module).items():
        name = _join(prefix, key)
        is_above = any(layer.startswith(f"{name}.") for layer in layers)
        is_elsewhere = child is None or ownership.is_elsewhere(child, name)
        if child is None or (is_elsewhere and not is_above):
            continue
        if is_above or not ownership.is_whole(child, name):
            below = nn.Module()
            below.train(child.training)
            _fill(below, child, name, ownership, layers)
            # A decoder of other ranks may have a table of positions, which follow from the inputs.
            if not is_elsewhere or next(listings.buffers(below), None) is not None:
                container.add_module(key, below)
        else:
            container.add_module(key, child)


class _Ownership:
    """Decides module by module whether this rank holds it."""

    def __init__(self, local: Collection[str], elsewhere: Collection[str]) -> None:
        self.local = local
        self._elsewhere = elsewhere

    def is_elsewhere(self, module: nn.Module, prefix: str) -> bool:
        """Return whether ``module`` has owned tensors and other ranks hold all of them."""
        names = self._names(module, prefix)
        return bool(names) and not any(name in self.local for name in names)

    def buffer_is_elsewhere(self, module: nn.Module, prefix: str, key: str) -> bool:
        """Return whether other ranks hold ``module``, or this changing buffer of it."""
        return _join(prefix, key) in self._elsewhere or self.is_elsewhere(module, prefix)

    def is_whole(self, module: nn.Module, prefix: str) -> bool:
        """Return whether this rank holds all owned tensors of ``module``."""
        return all(name in self.local for name in self._names(module, prefix))

    def _names(self, module: nn.Module, prefix: str) -> list[str]:
        """Names of the tensors of ``module`` that have owners: parameters, and buffers that change."""
        parameters = [_join(prefix, key) for key, _ in listings.named_parameters(module, remove_duplicate=False)]
        buffers = [_join(prefix, key) for key, _ in listings.named_buffers(module, remove_duplicate=False)]
        return parameters + [name for name in buffers if name in self.local or name in self._elsewhere]


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key
