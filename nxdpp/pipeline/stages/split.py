"""Split of a traced graph into one graph for each stage, over the original modules.

A value with an edge to a later stage is sent there. A node that follows from the inputs only is
copied into each stage that needs it. Such a node may read the shape, dtype or device of a value of an earlier stage.
The stage then has an empty metadata placeholder for that value::

    stage 0                                  stage 1
    input_ids ── embed_tokens ── layers.0 ─────────▶ layers.1 ── norm ── lm_head ── loss
        │             └─ mask ──────┘     (sent)       │
        │             └╌╌╌╌╌╌╌╌╌╌╌╌ (metadata only) ╌╌▶ mask
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx, nn

from nxdpp.devices.kinds import has_streams
from nxdpp.pipeline.stages.answered_call import answer_questions
from nxdpp.pipeline.stages.first_run import FirstRun
from nxdpp.pipeline.stages.in_place_guard import Guard, may_change_arguments
from nxdpp.pipeline.stages.stage_modes import StageModes
from nxdpp.ranks import parallel_state
from nxdpp.tracing.graph.checks import must_run, passes_on
from nxdpp.tracing.graph.trace import TracedGraph
from nxdpp.tracing.graph.uses import changed_buffers, metadata_arguments, modules_of


@dataclass
class StagePlan:
    """Inputs, nodes, sent and received values of one stage. A value has the name of its node in the traced graph.

    Attributes:
        stage: number of the stage.
        inputs: names of the model's inputs that the stage uses.
        received: source stage of each received value.
        received_metadata: source stage of each value that is used only for its metadata.
        sent: destination stages of each sent value.
        sent_metadata: destination stages of each value that is sent only as metadata.
        results: values of the model's output, on the last stage.
        nodes: nodes that the stage runs or receives.
        elsewhere: nodes among ``nodes`` that a later stage has a copy of.
    """

    stage: int
    inputs: list[str] = field(default_factory=list)
    received: dict[str, int] = field(default_factory=dict)
    received_metadata: dict[str, int] = field(default_factory=dict)
    sent: dict[str, list[int]] = field(default_factory=dict)
    sent_metadata: dict[str, list[int]] = field(default_factory=dict)
    results: list[str] = field(default_factory=list)
    nodes: set[fx.Node] = field(default_factory=set)
    elsewhere: set[fx.Node] = field(default_factory=set)

    @property
    def made(self) -> list[str]:
        """Values that the stage's graph returns, for other stages or the caller, each once."""
        return list(dict.fromkeys([*self.sent, *self.sent_metadata, *self.results]))

    @property
    def source_stages(self) -> list[int]:
        """Stages of received values and metadata."""
        return sorted({*self.received.values(), *self.received_metadata.values()})

    @property
    def destination_stages(self) -> list[int]:
        """Stages that receive values or metadata of this one."""
        return sorted({stage for stages in (*self.sent.values(), *self.sent_metadata.values()) for stage in stages})


def plan_stages(
    traced: TracedGraph, root: nn.Module, assigned: Mapping[fx.Node, int], results: Sequence[fx.Node], stages: int
) -> list[StagePlan]:
    """Return the plan of each stage, such that the last stage ends with ``results``.

    Nodes that no result needs are left out, unless they change buffers or check an assumption of the trace. Raises
    ``ValueError`` for a stage that needs a value of a later one.
    """
    plans = [StagePlan(stage) for stage in range(stages)]
    plans[-1].results = [node.name for node in results]
    by_name = {node.name: node for node in traced.graph.nodes}
    first = _first_stages(traced, assigned)
    # Nodes of each stage, from the last: a stage then knows all values that later stages want of it.
    for plan in reversed(plans):
        wanted = [by_name[name] for name in plan.made]
        if plan.stage == stages - 1:
            wanted = list(results)
        wanted += [node for node, stage in assigned.items() if stage == plan.stage and _changes_buffers(node, root)]
        wanted += [node for node, stage in first.items() if stage == plan.stage and must_run(node)]
        _collect(plan, plans, wanted, root, assigned)
        for name in plan.received.keys() & plan.received_metadata.keys():
            _drop_received_metadata(plan, plans, name)
    # Copies on later stages, and inputs.
    later: set[fx.Node] = set()
    for plan in reversed(plans):
        plan.elsewhere = plan.nodes & later
        later |= plan.nodes
    for plan in plans:
        plan.inputs = [name for name in traced.inputs if any(n.target == name for n in plan.nodes)]
    return plans


def build_stage(
    plan: StagePlan,
    traced: TracedGraph,
    root: nn.Module,
    assigned: Mapping[fx.Node, int],
    first_run: FirstRun | None = None,
) -> fx.GraphModule:
    """Return a module that maps inputs, received values and metadata placeholders, in this order, to ``plan.made``.

    ``first_run`` watches the modules of the stage.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    placeholders: dict[fx.Node, fx.Node] = {}
    by_name = {node.name: node for node in traced.graph.nodes}
    # Placeholders.
    for node in traced.graph.nodes:
        if node.op == "placeholder" and node.target in plan.inputs:
            copies[node] = graph.placeholder(f"input_{node.name}")
    for name in plan.received:
        copies[by_name[name]] = graph.placeholder(f"received_{name}")
    for name in plan.received_metadata:
        placeholders[by_name[name]] = graph.placeholder(f"metadata_{name}")
    # Guards of values with copies on other stages, and the nodes themselves.
    over_all, over_users, runs_ahead = Guard(graph), Guard(graph), _has_streams()
    modes = StageModes(graph)
    for name in _on_several_stages(plan, root, assigned):
        over_all.begin_buffers(root.get_submodule(name), name)
    for name in plan.received:
        if by_name[name] in plan.elsewhere:
            over_all.begin(copies[by_name[name]], by_name[name])
    for node in traced.graph.nodes:
        if node in plan.nodes and node not in copies:
            if not _is_call_of_module(node):
                over_users.end()
            if node in assigned and may_change_arguments(node, root):
                for argument in node.all_input_nodes:
                    if argument in copies and _follows_from_shared(argument, plan, assigned):
                        over_users.begin(copies[argument], argument, node)
            modes.begin(node)
            copies[node] = _copy(graph, node, copies, placeholders)
            if first_run is not None:
                # The first run names the user that changes a value. Later ones check once for all users in a row.
                first_run.watch(copies[node], node)
                over_users.end()
            if runs_ahead:
                answer_questions(copies[node], node, root)
    over_users.end()
    over_all.end()
    graph.output(tuple(copies[by_name[name]] for name in plan.made))
    module = fx.GraphModule(root, graph, class_name=f"Stage{plan.stage}")
    modes.restore_after(module)
    return module


def _is_call_of_module(node: fx.Node) -> bool:
    """Return whether ``node`` calls a module, or passes on its output: no code between the modules."""
    return node.op == "call_module" or node.target is operator.getitem or passes_on(node)


def _first_stages(traced: TracedGraph, assigned: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """Return the stage of each node, the first one with all values that it needs for a node without one."""
    first: dict[fx.Node, int] = {}
    for node in traced.graph.nodes:
        needed = max((first[argument] for argument in node.all_input_nodes), default=0)
        first[node] = assigned.get(node, needed)
    return first


def _changes_buffers(node: fx.Node, root: nn.Module) -> bool:
    return any(changed_buffers(module) for module in modules_of(node, root).values())


def _collect(
    plan: StagePlan, plans: list[StagePlan], wanted: list[fx.Node], root: nn.Module, assigned: Mapping[fx.Node, int]
) -> None:
    pending = list(wanted)
    while pending:
        node = pending.pop()
        source = assigned.get(node, plan.stage)
        if source != plan.stage:
            _request(plan, plans[source], node.name, plan.received, plans[source].sent)
            plan.nodes.add(node)
            continue
        if node in plan.nodes:
            continue
        plan.nodes.add(node)
        of_metadata = metadata_arguments(node, root)
        for argument in node.all_input_nodes:
            source = assigned.get(argument, plan.stage)
            if argument in of_metadata and source != plan.stage:
                _request(plan, plans[source], argument.name, plan.received_metadata, plans[source].sent_metadata)
            else:
                pending.append(argument)


def _on_several_stages(plan: StagePlan, root: nn.Module, assigned: Mapping[fx.Node, int]) -> list[str]:
    """Return the modules with changing buffers that this stage and other stages run."""
    stages: dict[str, set[int]] = {}
    for node, stage in assigned.items():
        for name, module in modules_of(node, root).items():
            if changed_buffers(module):
                stages.setdefault(name, set()).add(stage)
    return [name for name, held in stages.items() if len(held) > 1 and plan.stage in held]


def _follows_from_shared(value: fx.Node, plan: StagePlan, assigned: Mapping[fx.Node, int]) -> bool:
    """Return whether this stage and a later one compute ``value``, or a value that it may be a view of."""
    pending, seen = [value], set()
    while pending:
        node = pending.pop()
        if node in seen or node in assigned:
            continue
        seen.add(node)
        if node in plan.elsewhere:
            return True
        pending += node.all_input_nodes
    return False


def _request(plan: StagePlan, source: StagePlan, name: str, taken: dict[str, int], given: dict[str, list[int]]) -> None:
    if name in taken:
        return
    if source.stage > plan.stage:
        raise ValueError(
            f"stage {plan.stage} needs the value {name} of the later stage {source.stage}. Cut elsewhere "
            f"(pipeline_cuts), or give input_names=[...] of all inputs."
        )
    taken[name] = source.stage
    given.setdefault(name, []).append(plan.stage)


def _drop_received_metadata(plan: StagePlan, plans: list[StagePlan], name: str) -> None:
    sent_metadata = plans[plan.received_metadata.pop(name)].sent_metadata
    sent_metadata[name].remove(plan.stage)
    if not sent_metadata[name]:
        del sent_metadata[name]


def _copy(
    graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node], placeholders: Mapping[fx.Node, fx.Node]
) -> fx.Node:
    # A received value serves for its metadata too.
    return graph.node_copy(node, lambda old: copies[old] if old in copies else placeholders[old])


def _has_streams() -> bool:
    return parallel_state.model_parallel_is_initialized() and has_streams(parallel_state.local_device().type)
