"""Assignment of graph nodes, parameters and buffers to stages.

A node that depends on parameters or random numbers runs on one stage, decided by the order of execution. Every other
node follows from the inputs, which all ranks have: each stage that needs it computes it.
"""

from collections.abc import Iterable, Mapping, Sequence

from torch import fx, nn

from nxdpp.ground.torch_names import BUFFERS, PARAMETERS
from nxdpp.tracing.code.order import parts_in_order
from nxdpp.tracing.graph import uses
from nxdpp.tracing.graph.checks import asks_for_none
from nxdpp.tracing.graph.errors import model_line
from nxdpp.tracing.graph.trace import TracedGraph
from nxdpp.tracing.models.captured_outputs import ends_capture
from nxdpp.tracing.models.library_calls import pads_a_result
from nxdpp.tracing.models.shared_state import contents
from nxdpp.tracing.modules import listings
from nxdpp.tracing.modules.left_behind import reads_left_behind

# Name of a parameter, or of a changing buffer -> the stages (or ranks) that hold it.
Owners = dict[str, set[int]]
# Name of a parameter or of a module above it -> the stages of each parameter.
_Owned = dict[str, list[set[int]]]


def layers_in_order(traced: TracedGraph, known: Sequence[str]) -> list[str]:
    """Return the transformer layers that the graph runs, in the order of execution.

    The graph may leave out some of the ``known`` layers, such as a vision tower for text inputs. Raises ``ValueError``
    for a graph without layers, and for a repeated layer.
    """
    if traced.layers and len(set(traced.layers)) == len(traced.layers):
        return list(traced.layers)
    check_layers_ran(traced, known)
    raise AssertionError("layers that ran in the order of the model ran once")


def check_layers_ran(traced: TracedGraph, layers: Sequence[str]) -> None:
    """Raise ``ValueError`` unless the graph runs each of ``layers`` once."""
    missing = [layer for layer in layers if layer not in traced.layers]
    repeated = sorted({layer for layer in traced.layers if traced.layers.count(layer) > 1})
    if not missing and not repeated:
        return
    told = "a pipeline needs every transformer layer to run once, in the order of the model. "
    if missing:
        told += f"Not run with the inputs {list(traced.inputs)}: {missing}. "
    if repeated:
        told += (
            f"Run several times: {repeated}; for other rows each time (chosen and rejected answers, two towers) run "
            f"the layers once for all rows (torch.cat) and split the result; for the same rows make a module for each "
            f"time and share the weights between them (b.weight = a.weight). "
        )
    told += f"The order of execution is {list(traced.layers)}."
    if missing:
        told += " Name another transformer_layer_cls, one whose instances follow each other."
    raise ValueError(told)


def assign_nodes(
    traced: TracedGraph, root: nn.Module, layer_stages: Mapping[str, int], stages: int, owners: Owners | None = None
) -> dict[fx.Node, int]:
    """Return the stage of each node that has one.

    Args:
        traced: the graph of ``root``.
        root: the model.
        layer_stages: the stage of each transformer layer, in order.
        stages: number of stages. The last one has the nodes after the last layer.
        owners: the stages that hold each parameter. A module then runs on a stage that holds its parameters.
            Without it only the order of execution decides.
    """
    assigned: dict[fx.Node, int] = {}
    ends = {stage: layer for layer, stage in layer_stages.items()}
    owned = None if owners is None else _by_module(owners)
    current = 0
    for node in traced.graph.nodes:
        if node.op in ("placeholder", "output") or not _belongs_to_a_stage(node, root, assigned):
            continue
        assigned[node] = _stage_of(node, root, assigned, current, owned)
        if node.op == "call_module" and node.target in layer_stages:
            stage = layer_stages[node.target]
            current = stage + 1 if ends[stage] == node.target and stage < stages - 1 else stage
    # Users of a parameter, or of a module itself, read it on their own stages.
    everywhere = {node for node in assigned if is_parameter(node, root) or uses.is_module(node, root)}
    return {node: stage for node, stage in assigned.items() if node not in everywhere}


def assign_layers(traced: TracedGraph, root: nn.Module, layers: Sequence[str]) -> dict[fx.Node, int]:
    """Return the number of the layer that each node runs with: the next one, or the last one for what follows it."""
    return assign_nodes(traced, root, {layer: index for index, layer in enumerate(layers)}, len(layers))


def parameter_owners(assigned: Mapping[fx.Node, int], root: nn.Module) -> Owners:
    """Return the stages that use each parameter of ``root``.

    A parameter without a node has the stage that the order of the code tells: a vision tower is with the first layer
    after it, a pooler with the last layer. Otherwise it has the stage of the parameter before it.
    """
    parameters = dict(listings.named_parameters(root, remove_duplicate=False))
    owners: Owners = {name: set() for name in parameters}
    by_identity: dict[int, set[int]] = {id(parameter): set() for parameter in parameters.values()}
    users = dict(assigned)
    for node in next(iter(assigned)).graph.nodes if assigned else ():
        if node.op == "output":
            # The last stage returns the output.
            users[node] = max(assigned.values())
    for node, stage in users.items():
        for name in parameters_used(node, root):
            owners[name].add(stage)
            by_identity[id(parameters[name])].add(stage)
    previous = {0}
    unused = UnusedParts(assigned, root)
    for name, stages in owners.items():
        # An unused second name of a tied parameter follows the name in use.
        previous = stages or by_identity[id(parameters[name])] or unused.stages(name) or {max(previous)}
        owners[name] = set(previous)
    return owners


def buffer_owners(traced: TracedGraph, assigned: Mapping[fx.Node, int], root: nn.Module) -> Owners:
    """Return the stages of each buffer that its module's forward may change (``tracing/graph/uses.py``).

    Other buffers, such as a rotary table, are constants that every rank keeps. Raises ``ValueError`` where two stages
    would each change a copy, and where code outside the module reads a changing buffer.
    """
    stages: dict[int, set[int]] = {}
    for node, stage in assigned.items():
        for module in uses.modules_of(node, root).values():
            for child in listings.modules(module):
                stages.setdefault(id(child), set()).add(stage)
    owners: Owners = {}
    for path, module in listings.named_modules(root, remove_duplicate=False):
        if id(module) not in stages or not uses.may_change_buffers(module):
            continue
        held = stages[id(module)]
        if len(held) > 1 and uses.is_from_torch(module):
            raise ValueError(
                f"{path}, a {type(module).__name__}, keeps statistics of its inputs and runs on the stages "
                f"{sorted(held)}; it must run on one. Use one module for each place, or cut elsewhere (pipeline_cuts)."
            )
        owners |= {f"{path}.{name}": set(held) for name, buffer in BUFFERS.of(module).items() if buffer is not None}
    for node in traced.graph.nodes:
        if node.op == "get_attr" and node.target in owners and node.users:
            raise ValueError(
                f"forward reads the buffer {node.target} outside the module that changes it "
                f"at {model_line(node.stack_trace)}. Return the buffer from that module."
            )
    return owners


def check_buffers_have_owners(
    traced: TracedGraph, assigned: Mapping[fx.Node, int], root: nn.Module, owners: Owners
) -> None:
    """Raise ``ValueError`` for a buffer that the graph changes, and that ``owners`` give to no stage."""
    unknown = sorted(buffer_owners(traced, assigned, root).keys() - owners.keys())
    if unknown:
        raise ValueError(f"these inputs run modules that change the buffers {unknown}, which belong to no stage.")


def check_last_stage(owners: Owners, stages: int, layer: str) -> None:
    """Raise ``ValueError`` where the last stage holds no parameter, because none follows the last ``layer``."""
    if not any(stages - 1 in held for held in owners.values()):
        raise ValueError(
            f"the last of {stages} pipeline stages would have no parameters: no module with any runs after {layer}, "
            f"the last transformer layer. Cut earlier (pipeline_cuts), or use fewer stages."
        )


def parameters_used(node: fx.Node, root: nn.Module) -> list[str]:
    """Return the names of the parameters that ``node`` needs: its module's, and its arguments."""
    names = [str(argument.target) for argument in node.all_input_nodes if is_parameter(argument, root)]
    for path, module in uses.modules_of(node, root).items():
        names += [f"{path}.{name}" for name, _ in listings.named_parameters(module, remove_duplicate=False)]
    return names


def is_parameter(node: fx.Node, root: nn.Module) -> bool:
    """Return whether ``node`` reads a parameter of ``root``."""
    if node.op != "get_attr":
        return False
    owner, _, name = str(node.target).rpartition(".")
    return name in PARAMETERS.of(listings.submodule(root, owner))


def _belongs_to_a_stage(node: fx.Node, root: nn.Module, stages: Mapping[fx.Node, int]) -> bool:
    if is_parameter(node, root) or uses.draws_random_numbers(node, root):
        return True
    if any(True for module in uses.modules_of(node, root).values() for _ in listings.parameters(module)):
        return True
    only_metadata = uses.metadata_arguments(node, root)
    return any(argument in stages and argument not in only_metadata for argument in node.all_input_nodes)


def _stage_of(node: fx.Node, root: nn.Module, stages: Mapping[fx.Node, int], current: int, owned: _Owned | None) -> int:
    argument = node.args[0] if node.args else None
    if _reads_a_result(node) and isinstance(argument, fx.Node) and argument in stages:
        return stages[argument]
    if owned is None:
        return current
    # Names as they were when the model was cut: this rank may have replaced parameters, unknown to other ranks.
    names = [str(argument.target) for argument in node.all_input_nodes if is_parameter(argument, root)]
    names += uses.modules_of(node, root)
    possible = _common(stages for name in names for stages in owned.get(name, ()))
    if possible is None or current in possible:
        return current
    if not possible:
        raise ValueError(f"{node.target} needs parameters that are on different stages; it cannot run on one.")
    return max([stage for stage in possible if stage <= current] or possible)


def _by_module(owners: Owners) -> _Owned:
    owned: _Owned = {}
    for name, stages in owners.items():
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            owned.setdefault(".".join(parts[:length]), []).append(stages)
    return owned


def _reads_a_result(node: fx.Node) -> bool:
    """Return whether ``node`` only picks an item of another node's value, or checks it, and so stays on its stage."""
    if asks_for_none(node) or pads_a_result(node) or reads_left_behind(node) or ends_capture(node):
        return True
    return node.op == "call_function" and (getattr(node.target, "__name__", "") == "getitem" or node.target is contents)


def _common(sets: Iterable[set[int]]) -> set[int] | None:
    stages = list(sets)
    return set.intersection(*stages) if stages else None


class UnusedParts:
    """Stages of the parts of modules above layers that the graph leaves out, from the order of the code."""

    def __init__(self, assigned: Mapping[fx.Node, int], root: nn.Module) -> None:
        self._root = root
        # Stages of the nodes of each module, and in each module above layers.
        self._nodes: dict[str, set[int]] = {}
        self._above: dict[str, set[int]] = {}
        for node, stage in assigned.items():
            if node.op == "call_module":
                parts = str(node.target).split(".")
                self._nodes.setdefault(str(node.target), set()).add(stage)
                for length in range(len(parts)):
                    self._above.setdefault(".".join(parts[:length]), set()).add(stage)
        self._orders: dict[str, list[str]] = {}

    def stages(self, name: str) -> set[int]:
        """Return the stage of the parameter ``name``, or none if the code does not tell.

        It is the first one of the next module with layers, or the last one of the modules before.
        """
        path = name.rpartition(".")[0]
        while path and path not in self._above:
            path = path.rpartition(".")[0]
        prefix = f"{path}." if path else ""
        order = [prefix + part for part in self._order(path)]
        part = prefix + name.removeprefix(prefix).partition(".")[0]
        if part not in order:
            return set()
        before, after = order[: order.index(part)], order[order.index(part) :]
        if found := next((self._above[other] for other in after if other in self._above), None):
            return {min(found)}
        if any(other in self._above for other in before):
            return {max(stage for other in before for stage in self._stages_of(other))}
        return set()

    def _stages_of(self, path: str) -> set[int]:
        return self._above.get(path) or self._nodes.get(path) or set()

    def _order(self, path: str) -> list[str]:
        if path not in self._orders:
            self._orders[path] = parts_in_order(listings.submodule(self._root, path)) if path in self._above else []
        return self._orders[path]
