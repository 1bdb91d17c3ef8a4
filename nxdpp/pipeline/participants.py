"""The participants of a step, in the order of their verbs: ``Participants``.

::

    before     this rank alone: after an error it can continue
    after      all ranks of the pipeline have agreed on the step; its first action comes next
    actions    around the ones of stages (``schedules.lowering.additions``)
    finish     after the last action
    abandon    the step has failed, before or after the ranks agreed

A new idea that takes part in a step is a participant, or an action. A class of modules may bring one: the class that is
its ``participant_of_steps``, called with the part, the replicas and lines that these have alike.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from nxdpp.devices.device import Device
from nxdpp.devices.kinds import device_of
from nxdpp.gradients.grad_scaler import GradScaler
from nxdpp.gradients.replica_gradients import ReplicaGradients
from nxdpp.gradients.shards.rank_shards import RankShards
from nxdpp.pipeline.config import PipelineConfig
from nxdpp.pipeline.local.part import Part
from nxdpp.pipeline.local.tied_weights import TiedWeights
from nxdpp.pipeline.p2p.transport import Transport
from nxdpp.pipeline.partition.partition import Partition
from nxdpp.pipeline.reference_step import Reference
from nxdpp.pipeline.step import Participant, Step
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.group_values import extremes
from nxdpp.ranks.random_stream import ProgramNumbers, RandomStream, stream_state_of
from nxdpp.schedules.actions import ActionKind
from nxdpp.schedules.lowering.additions import AVERAGE, Addition, Around
from nxdpp.tensor.sequence_parallel import StepGradients
from nxdpp.tensor.tensor_copies import TensorCopies


class Participants:
    """The participants of one pipeline on this rank.

    Attributes:
        draws: the streams of random numbers.
        all: in the order of their verbs.
        evaluating: those that take part in evaluations.
    """

    def __init__(
        self,
        config: PipelineConfig,
        partition: Partition,
        part: Part,
        replicas: ReplicaGradients,
        copies: TensorCopies,
        transport: Callable[[torch.device], Transport],
        schedule: str,
    ) -> None:
        self.draws = Draws(part, replicas)
        self._replicas = replicas
        self.all: list[Participant] = []
        if config.grad_scaler is not None:
            self.all.append(Scaler(config.grad_scaler))
        tied, changes = part.tied, part.changes
        if tied.has_weights:
            self.all.append(
                Sums(ActionKind.SUM_TIES, tied, lambda numbers: tied.add_up(transport(changes.device), numbers))
            )
        if parallel_state.get_tensor_model_parallel_size() > 1:
            gradients = StepGradients(part.module)
            self.all += [Sums(ActionKind.SUM_SEQUENCE, gradients, gradients.add_up), Copies(copies, part)]
        if config.check_against_module is not None:
            self.all.append(Reference(part, partition.owners, config))
        facts = [f"schedule: {schedule}", f"cuts: {partition.cuts}"]
        kinds = dict.fromkeys(getattr(type(each), "participant_of_steps", None) for each in part.root.modules())
        brought: list[Participant] = [kind(part, replicas, facts) for kind in kinds if kind is not None]
        self.all += [*brought, Replicas(replicas, config.check_inputs != "never"), self.draws]
        self.evaluating: list[Participant] = [*brought, self.draws]

    def told(self) -> dict[str, Any]:
        """Return what metrics and the timeline have of this rank in the last training step, for JSON."""
        return {name: value for each in self.evaluating for name, value in each.told().items()}

    def add_shards(self, shards: RankShards) -> None:
        """Add the units that this rank's parameters have become."""
        participant = Shards(shards, self._replicas)
        for each in (self.all, self.evaluating):
            each.insert(-1, participant)


class Scaler(Participant):
    """The scaler of the loss."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler

    def before(self, step: Step) -> None:
        """Have the scale on the device of the step."""
        self._scaler.begin_step(step.device)


class Sums(Participant):
    """Sums over ranks after the last backward: of tied weights, and of parts of a sequence (``sequence_parallel``).

    Earlier gradients are set aside meanwhile. ``Note: sums of ties`` in ``tied_weights`` has the reasons.

    Args:
        kind: of the action.
        gradients: that are set aside and put back.
        add_up: adds them up, with the microbatch of each action of the step.
    """

    def __init__(
        self, kind: ActionKind, gradients: TiedWeights | StepGradients, add_up: Callable[[Sequence[int]], None]
    ) -> None:
        self._gradients = gradients
        self._microbatches: Sequence[int] = ()
        self.additions = [Addition(Around.END, None, kind)]
        self.calls = {kind: lambda last: add_up(self._microbatches)}

    def after(self, step: Step) -> None:
        """Set earlier gradients aside."""
        self._microbatches = step.engine.microbatches
        self._gradients.set_aside()

    def abandon(self) -> None:
        """Put earlier gradients back."""
        self._gradients.put_back()


class Copies(Participant):
    """Parameters that each tensor-parallel rank has a copy of."""

    def __init__(self, copies: TensorCopies, part: Part) -> None:
        self._copies, self._part = copies, part

    def after(self, step: Step) -> None:
        """Verify that they are equal."""
        self._copies.verify(self._part.compared.seed)


class Replicas(Participant):
    """The average over data-parallel replicas, whose parameters are compared."""

    def __init__(self, replicas: ReplicaGradients, compares_batches: bool) -> None:
        self._replicas, self._compares_batches = replicas, compares_batches
        if parallel_state.get_replica_size() > 1:
            self.additions = AVERAGE
            self.calls = {
                ActionKind.AVERAGE: lambda backward: replicas.before_last(backward.stage),
                ActionKind.AVERAGED: lambda backward: replicas.after_last(backward.stage),
            }

    def before(self, step: Step) -> None:
        """Check that the gradients from before can be averaged with those of the step."""
        self._replicas.begin_step(step.average)

    def after(self, step: Step) -> None:
        """Compare parameters and batches, and begin the average."""
        self._replicas.optimizers.begin_step()
        self._replicas.verify(step.hashes if self._compares_batches else ())
        if self.additions:
            with failure_watch.reported():
                self._replicas.begin(step.engine.last_backwards)

    def finish(self, step: Step) -> None:
        """Average what is not averaged."""
        self._replicas.finish()

    def abandon(self) -> None:
        """Forget the average."""
        self._replicas.abandon()


class Shards(Participant):
    """Gathers of sharded parameters, and reductions of their gradients."""

    def __init__(self, shards: RankShards, replicas: ReplicaGradients) -> None:
        self._shards, self._replicas = shards, replicas
        self.additions = [*shards.additions, Addition(Around.END, None, ActionKind.REDUCED)]
        self.calls = {**shards.calls, ActionKind.REDUCED: lambda last: shards.finish()}

    def add_program(self, program: fx.GraphModule) -> None:
        """Put whole parameters into the containers of ``program`` too."""
        self._shards.add_program(program)

    def before(self, step: Step) -> None:
        """Drop whole gradients that ``zero_grad`` has cleared; earlier ones are not set aside yet."""
        if step.train:
            self._shards.drop_cleared()

    def after(self, step: Step) -> None:
        """Verify that the replicas begin the same step, and begin to gather."""
        lines = self._replicas.lines_of_step() if step.train else ()
        with failure_watch.reported():
            rounds = self._replicas.optimizers.rounds
            self._shards.begin(step.train, self._replicas.is_averaged, lines, rounds)

    def finish(self, step: Step) -> None:
        """Keep whole gradients of a step that is not averaged."""
        if step.train and not self._replicas.is_averaged:
            self._shards.keep()

    def abandon(self) -> None:
        """Put the rows back."""
        self._shards.abandon()


class Draws(Participant):
    """Random numbers of layers, which each rank draws from a stream of its own; one rank alone draws as ever.

    Attributes:
        stream: of the present step.
    """

    def __init__(self, part: Part, replicas: ReplicaGradients) -> None:
        self.stream: RandomStream | None = None
        self._numbers: ProgramNumbers | None = None
        self._has_begun = False
        self._device: Device | None = None
        self._draws = stream_state_of(part.module)
        self._replicas = replicas
        self._has_replicas = parallel_state.get_replica_size() > 1
        # One stage of one replica draws as one process does.
        self._place: tuple[int, int] | None = None
        if parallel_state.get_pipeline_model_parallel_size() > 1 or self._has_replicas:
            self._place = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_replica_rank()
        elif parallel_state.get_tensor_model_parallel_size() > 1:
            self._numbers = ProgramNumbers()

    @property
    def compared(self) -> int:
        """Number that all ranks of a tensor group must have in the present step."""
        source = self.stream or self._numbers
        return 0 if source is None else source.compared

    def before(self, step: Step) -> None:
        """Make the stream, of which the ranks compare the state."""
        if self._place is not None:
            kind = f"train={step.train}, training={step.graphs.cuts[0].training}"
            if self._device is None or self._device.device != step.device:
                self._device = device_of(step.device)
            self.stream = RandomStream(self._device, self._place, kind, self._draws)
        elif self._numbers is not None:
            self._numbers.begin(device_of(step.device))

    def after(self, step: Step) -> None:
        """Draw from the stream."""
        if self.stream is not None:
            self._has_begun = True
            self.stream.begin()

    def finish(self, step: Step) -> None:
        """Draw as the program did, and agree after the first step of a kind whether layers draw in such steps."""
        stream, self.stream = self.stream, None
        if stream is None:
            if self._numbers is not None:
                self._numbers.end(device_of(step.device))
            return
        self._has_begun = False
        stream.end()
        if stream.moves is None:
            with failure_watch.reported():
                moves = bool(extremes([stream.has_drawn], parallel_state.get_pipeline_control_group())[1][0])
            if self._has_replicas:
                # An evaluation is collective over the ranks of its pipeline: each replica may make its own.
                moves = step.train and self._replicas.is_in_any("comparison of random numbers", moves)
            stream.settle(moves)

    def abandon(self) -> None:
        """Draw as the program did."""
        stream, self.stream = self.stream, None
        if stream is not None and self._has_begun:
            self._has_begun = False
            stream.end()
