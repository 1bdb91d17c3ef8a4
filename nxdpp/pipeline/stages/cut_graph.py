"""Traced graph with the stage of each node, ready to be split into stage modules."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import fx

from nxdpp.agreement.fingerprint import Fingerprint, fingerprint
from nxdpp.counted import counted
from nxdpp.ground.torch_names import pytree
from nxdpp.pipeline.input_names import forward_names
from nxdpp.pipeline.partition.partition import Partition
from nxdpp.pipeline.stages.first_run import FirstRun
from nxdpp.pipeline.stages.loss import LossSpec, pick_loss, pick_loss_of_sample
from nxdpp.pipeline.stages.split import StagePlan, build_stage, plan_stages
from nxdpp.tracing.graph.search import ancestors, reached
from nxdpp.tracing.graph.trace import TracedGraph
from nxdpp.tracing.sizes.sizes import Shapes, Sizes, UnknownSizeError
from nxdpp.tracing.state.shared_objects import SharedBuffers, SharedObjects
from nxdpp.tracing.values.metadata import of_values
from nxdpp.tracing.values.nested import is_dataclass_instance, leaves_of, map_leaves

EndsWith = Literal["loss", "output", "loss and output"]


@dataclass(eq=False)
class StageProgram:
    """One stage.

    Attributes:
        plan: the plan of the stage.
        module: maps inputs, received values and metadata placeholders to ``plan.made``.
        first_run: the same module, which verifies that its layers change nothing that the spine reads; ``None`` after
            the first run, and where the spine has no code of the user.
    """

    plan: StagePlan
    module: fx.GraphModule
    first_run: fx.GraphModule | None = None


@dataclass(eq=False)
class RankStages:
    """The stages of one rank.

    Attributes:
        stages: the local stages, by number.
        edges: pairs of source and destination stage, of the whole pipeline.
        graph: fingerprint of the graph of all stages, and of all settings that must be equal on their ranks.
        results: values that the last stage ends with.
        graphs: the stages for each graph of a step that has several; the other attributes are of the first graph then,
            with the edges of all and a fingerprint of all.
    """

    stages: Mapping[int, StageProgram]
    edges: frozenset[tuple[int, int]]
    graph: Fingerprint
    results: list[str]
    graphs: tuple["RankStages", ...] = ()

    @classmethod
    def of_graphs(cls, graphs: Sequence["RankStages"]) -> "RankStages":
        """Return the stages of a step whose microbatches have several ``graphs``."""
        lines = (f"graph {number}: {line}" for number, graph in enumerate(graphs) for line in graph.graph.lines)
        edges = frozenset().union(*(graph.edges for graph in graphs))
        return cls(graphs[0].stages, edges, fingerprint(lines), graphs[0].results, tuple(graphs))


class CutGraph:
    """One traced graph, cut by a partition.

    Attributes:
        traced: the graph.
        partition: of the model.
        training: ``True`` if the model was in training mode.
        programs: of this rank, by their end; ``ProgramCache`` keeps them here.
        assigned: the stage of each node that has one.
        first_trained: the first stage with a trained parameter. Engines expect no gradients for earlier stages.
        output: the model's output, with a node in place of each value.

    Raises ``ValueError`` for a graph that does not run the layers of the partition in order.
    """

    def __init__(self, traced: TracedGraph, partition: Partition, training: bool = False) -> None:
        self.traced = traced
        self.partition = partition
        self.training = training
        self.programs: dict[EndsWith, RankStages] = {}
        self.assigned = partition.assign(traced)
        self.first_trained = partition.first_trained
        (values,) = next(node.args for node in traced.graph.nodes if node.op == "output")
        self.output: Any = pytree.tree_unflatten(list(values), traced.output_spec)
        self._are_of_no_input: list[bool] | None = None

    def loss(self, spec: LossSpec = None) -> fx.Node:
        """Return the node of the loss. Raises ``ValueError`` for an output without one."""
        if (of_function := self._of_function()) is not None:
            return of_function
        taken = forward_names(self.partition.module).parameters
        return _node(pick_loss(self.output, spec, [name for name in taken if name not in self.traced.inputs]))

    def loss_of_sample(self, spec: LossSpec = None) -> fx.Node:
        """Return the node of the loss of one sample, as ``pick_loss_of_sample`` finds it."""
        return self._of_function() or _node(pick_loss_of_sample(self.output, spec))

    def has_named_loss(self, spec: LossSpec = None) -> bool:
        """Return whether the output names a loss, or a loss function has all its inputs.

        Only its shape tells whether a lone value of the output is a loss: ``is_lone``.
        """
        if self.traced.loss is not None or self.traced.lacking_for_loss:
            return self.traced.loss is not None
        if spec is None and not (isinstance(self.output, Mapping) or is_dataclass_instance(self.output)):
            return False
        try:
            return isinstance(pick_loss(self.output, spec), fx.Node)
        except ValueError:
            return False

    @property
    def is_lone(self) -> bool:
        """Whether the output is one value, without a name and without a loss function."""
        return isinstance(self.output, fx.Node) and self.traced.loss is None and not self.traced.lacking_for_loss

    def are_of_no_input(self, shapes: Callable[[], Sequence[Shapes]]) -> list[bool]:
        """Return for each value of the output whether no value of an input decides it: a mask, a temperature.

        One that is made of the sizes, dtypes and devices of inputs is such, if its size is the same for inputs of all
        ``shapes()``, which have different rows: ``eye(x.shape[1])``, not ``ones(x.shape[0])``. None tell that of none.
        """
        if self._are_of_no_input is None:
            leaves = [leaf if isinstance(leaf, fx.Node) else None for leaf in leaves_of(self.output)]
            free = [leaf is not None and _is_free(ancestors(leaf)) for leaf in leaves]
            doubtful = [leaf for leaf in leaves if leaf is not None and _is_free(reached([leaf], of_values))]
            if len(doubtful) > sum(free) and (given := shapes()):
                sizes = [Sizes(self.partition.module, each) for each in given]
                keep = {node for node in doubtful if _has_one_size(node, sizes)}
                free = [is_free or leaf in keep for is_free, leaf in zip(free, leaves, strict=True)]
            self._are_of_no_input = free
        return self._are_of_no_input

    def results(self) -> list[fx.Node]:
        """Return the nodes of all values of the output, each once."""
        return list(dict.fromkeys(leaf for leaf in leaves_of(self.output) if isinstance(leaf, fx.Node)))

    def plans(self, results: Sequence[fx.Node]) -> list[StagePlan]:
        """Return the plan of each stage, such that the last stage ends with ``results``."""
        return plan_stages(self.traced, self.partition.module, self.assigned, results, self.partition.stages)

    def build(self, plan: StagePlan) -> fx.GraphModule:
        """Return the module of one stage. It shares the parameters of the model."""
        return build_stage(plan, self.traced, self.partition.module, self.assigned)

    def build_program(self, plan: StagePlan, buffers: SharedBuffers | None = None) -> StageProgram:
        """Return the program of one stage. Its first run is watched where code of the user is in the model.

        ``buffers`` have names in several layers.
        """
        module, state = self.partition.module, self.traced.state
        shared = SharedObjects(module, self._stages_of_modules(), plan.stage, buffers)
        first_run = None
        if state is not None or shared.has_user_code:
            watch = FirstRun(state, module, shared)
            first_run = build_stage(plan, self.traced, module, self.assigned, watch)
        return StageProgram(plan, self.build(plan), first_run)

    def _of_function(self) -> fx.Node | None:
        if self.traced.lacking_for_loss:
            raise ValueError(
                f"loss_fn takes {list(self.traced.lacking_for_loss)}, and the inputs are {list(self.traced.inputs)}. "
                f"Give run_train all inputs of loss_fn by name, or its parameters defaults."
            )
        return self.traced.loss

    def _stages_of_modules(self) -> dict[str, set[int]]:
        stages: dict[str, set[int]] = {}
        for node, stage in self.assigned.items():
            if node.op == "call_module":
                stages.setdefault(str(node.target), set()).add(stage)
        return stages


class StepGraphs(NamedTuple):
    """The graphs of a step's microbatches: ``cuts``, each once, and the number of each microbatch's.

    ``numbers`` is empty where all have one graph.
    """

    cuts: tuple[CutGraph, ...]
    numbers: tuple[int, ...] = ()

    def are_of_no_input(self, shapes: Callable[[], Sequence[Shapes]]) -> list[bool]:
        """Return ``are_of_no_input`` for all graphs at once; empty if the outputs differ."""
        columns = [cut.are_of_no_input(shapes) for cut in self.cuts]
        return [all(each) for each in zip(*columns, strict=True)] if len({*map(len, columns)}) == 1 else []

    def of_each(self, microbatches: Sequence[Mapping[str, Any]]) -> list[dict[int, Mapping[str, Any]]]:
        """Return for each of several graphs its ``microbatches``, by their number in the step."""
        graphs = range(len(self.cuts))
        return [{n: each for n, each in enumerate(microbatches) if self.numbers[n] == graph} for graph in graphs]


def _is_free(nodes: Iterable[fx.Node]) -> bool:
    return all(node.op != "placeholder" for node in nodes)


def _has_one_size(node: fx.Node, sizes: Sequence[Sizes]) -> bool:
    """Return whether the tensor ``node`` has one shape, of a dimension at least, in all ``sizes``."""
    try:
        first, *others = (each.read(node, _shape) for each in sizes)
    except UnknownSizeError:
        return False
    return bool(first) and all(other == first for other in others)


def _shape(value: Any) -> torch.Size | None:
    return value.shape if isinstance(value, torch.Tensor) else None


def _node(loss: Any) -> fx.Node:
    if isinstance(loss, list | tuple | Mapping):
        raise ValueError(
            f"the model's loss is a {type(loss).__name__} of {counted(len(loss), 'value')}, and one is differentiated. "
            "Add them up in forward (sum(losses)), or mark one of them with output_loss_value_spec, as the output is "
            "nested: "
            f'{{"loss": (True, False)}} for the first of two.'
        )
    if not isinstance(loss, fx.Node):
        raise ValueError(f"the model's loss is the constant {loss!r}; there is nothing to train.")
    return loss


def fill_output(output: Any, values: Mapping[str, Any]) -> Any:
    """Return ``output`` of a ``CutGraph`` with each node replaced by the value of its name."""
    return map_leaves(lambda leaf: values[leaf.name] if isinstance(leaf, fx.Node) else leaf, output)
