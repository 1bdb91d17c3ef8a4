"""The first run of a stage: modules must not change objects that the spine reads, or that they are given.

The trace has read such an object once, without the modules' changes. A change would be lost, or reach only the modules
of its own stage::

    layer:  AUX.append(loss)        spine:  return loss + sum(AUX)        traced as  loss + 0

The first run of a stage compares these objects before and after each module. It verifies three more things of a module:

* It changes no tensor that modules of other stages may read (``shared_objects.py``).
* It changes no tensor through ``.data`` that its own backward needs (``data_changes.py``).
* Its outputs have no attributes, which would be lost between stages.

Later runs cost nothing.
"""

import operator
from collections import UserDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from nxdpp.devices.host_answers import MARKS
from nxdpp.ground.torch_names import DYNAMO_MARKS
from nxdpp.tracing.code.names import is_framework
from nxdpp.tracing.graph.calls import OpaqueCall
from nxdpp.tracing.graph.checks import passes_on
from nxdpp.tracing.state.data_changes import DataOfModule
from nxdpp.tracing.state.reachable_state import ChangedState, DataWalk, ReachableState, differences
from nxdpp.tracing.state.shared_objects import SharedObjects
from nxdpp.tracing.values.nested import leaves_of


class FirstRun:
    """Watches the modules of one stage.

    Args:
        state: the state that the spine can reach, or ``None`` for a spine without code of the user.
        root: the model.
        shared: the tensors that modules of this stage share with modules of other stages.
    """

    def __init__(self, state: ReachableState | None, root: nn.Module, shared: SharedObjects) -> None:
        self._state, self._root, self._shared = state, root, shared

    def watch(self, node: fx.Node, original: fx.Node) -> None:
        """Make ``node`` of a stage's graph, a copy of ``original`` of the traced graph, a watched call."""
        given = [name for name, value in _arguments(original.args, original.kwargs) if not _is_of_one_user(value)]
        if node.op == "call_module":
            module = self._root.get_submodule(str(node.target))
            name = f"{node.target} ({type(module).__name__})"
            node.op, node.target = "call_function", _Watched(module, name, given, self._state, self._shared)
        elif isinstance(node.target, OpaqueCall) and not is_framework(_module_of(node.target.function)):
            node.target = _Watched(node.target, node.target.__name__, [], self._state, None)


@dataclass(eq=False, repr=False)
class _Watched:
    __name__ = "watched"

    call: Any
    name: str
    given: Sequence[int | str]
    state: ReachableState | None
    shared: SharedObjects | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {name: value for name, value in _arguments(args, kwargs) if name in self.given}
        state = None if self.state is None else self.state.snapshot()
        shared = self.shared.snapshot() if self.shared else None
        data = DataWalk(given)
        content = DataOfModule(self.call) if isinstance(self.call, nn.Module) else None
        output = self.call(*args, **kwargs)
        if self.state is not None and state is not None:
            changes = [change for change in differences(state, self.state.snapshot()) if change.is_of_values]
            self._refuse(changes)
        self._refuse_arguments(differences(data, DataWalk(given)))
        if self.shared is not None and shared is not None:
            self._refuse_shared(shared.first_change(self.shared.snapshot()))
        if content is not None:
            content.refuse_changes(self.name, (args, kwargs), output)
            self._refuse_attributes(output)
        return output

    def _refuse(self, changes: list[ChangedState]) -> None:
        if changes:
            raise RuntimeError(
                f"{self.name} changes {changes[0]}, and the code between the layers reads it; in a pipeline the "
                f"change would be lost. Return the value from {self.name}, or set it as an attribute of the module "
                f"(self.name = value in its forward), which is read after its run."
            )

    def _refuse_arguments(self, changes: list[ChangedState]) -> None:
        if changes:
            raise RuntimeError(
                f"{self.name} changes its argument {changes[0]}, and other users of it may be elsewhere; in a "
                f"pipeline the change would be lost. Return a new object with the value from {self.name}, and leave "
                f"the argument as it is: return {{**state, 'x': x}}, or return [*states, x]."
            )

    def _refuse_shared(self, path: str | None) -> None:
        if path is not None:
            raise RuntimeError(
                f"{self.name} changes {path}, which modules of other stages may read; each stage has a "
                f"copy, and the change would be lost there. Return the value from {self.name}, in place of storing "
                f"it there, and give it to the later modules as an argument. If it is a table that the first run "
                f"fills, run the model once before wrapping it, with inputs of the greatest length."
            )

    def _refuse_attributes(self, output: Any) -> None:
        for tensor in leaves_of(output):
            if type(tensor) is torch.Tensor:
                # torch.compile has its own marks on tensors, and an argument that is returned has ours.
                names = [name for name in vars(tensor) if not name.startswith((DYNAMO_MARKS.name, *MARKS))]
                if names:
                    raise RuntimeError(
                        f"{self.name} returns a tensor with the attribute {names[0]}, which a tensor loses between "
                        f"stages. Return the value beside the tensor: return y, value."
                    )


def _arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[int | str, Any]]:
    values: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    # The trace follows the content of such a mapping.
    return [(name, value) for name, value in values if not isinstance(value, UserDict)]


def _is_of_one_user(value: Any) -> bool:
    """Return whether ``value`` is a value of the graph that a module made, and that only one node uses.

    A list of such values is of one user too: the spine reads no item after the call.
    """
    if isinstance(value, list | tuple) and value:
        return all(_is_of_one_user(item) for item in value)
    if not isinstance(value, fx.Node) or len(value.users) != 1:
        return False
    if passes_on(value):
        return _is_of_one_user(value.args[0])
    return value.op in ("call_module", "placeholder", "call_method") or value.target is operator.getitem


def _module_of(function: Any) -> str:
    return getattr(function, "__module__", None) or ""
