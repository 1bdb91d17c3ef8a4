"""Engine: runs a lowered schedule on one rank. It makes no decisions.

The engine compiles the list of actions once into bound calls. Each step makes these calls in order::

    1RECV_F0   post the receives of activations (B, T, H) of earlier stages     channel.post
    1F0        forward of the stage                                             runner.forward
    1SEND_F0   start to send (B, T, H) to later stages                          runner.send_activation
               free finished sends                                              channel.release
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from torch import fx

from nxdpp.devices.kinds import device_of
from nxdpp.gradients.average_plan import LastBackward
from nxdpp.pipeline.backward.structure import warn_of_hidden_hooks
from nxdpp.pipeline.loss.step_loss import StepLoss
from nxdpp.pipeline.p2p.channel import Channel, RemoteChannel
from nxdpp.pipeline.p2p.transport import Direction, Transport
from nxdpp.pipeline.runtime.engine_config import EngineConfig
from nxdpp.pipeline.runtime.input_ranges import note_ranges
from nxdpp.pipeline.runtime.stage_channels import StageChannels
from nxdpp.pipeline.runtime.stage_runner import StageRunner
from nxdpp.pipeline.stages.cut_graph import StageProgram
from nxdpp.pipeline.timeline.clock import StepTimer
from nxdpp.pipeline.timeline.recorder import StepRecorder
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.board import board
from nxdpp.schedules.actions import Action, ActionKind
from nxdpp.tracing.code.raised_line import note_line

_RECEIVES = {
    ActionKind.RECEIVE_ACTIVATION: Direction.ACTIVATION,
    ActionKind.RECEIVE_GRADIENT: Direction.GRADIENT,
}
_SENDS = {ActionKind.SEND_ACTIVATION: Direction.ACTIVATION, ActionKind.SEND_GRADIENT: Direction.GRADIENT}

_BACKWARDS = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)


class LastBackwardWatch(Protocol):
    """Follows the last backward of each stage in a step, to average gradients meanwhile."""

    def before_last(self, stage: int) -> None:
        """Note that the last action of ``stage`` that computes gradients begins."""

    def after_last(self, stage: int) -> None:
        """Note that this action has ended."""


class ActionShards(Protocol):
    """Makes compute actions with the parameters that they need whole."""

    def add_program(self, program: fx.GraphModule) -> None:
        """Put whole parameters into the containers of ``program`` too, which runs a stage."""

    def run(self, stage: int, kind: ActionKind, is_first: bool, is_last: bool, compute: Callable[[], None]) -> None:
        """Make the call ``compute``, the first or the last action of ``stage`` in the step, or another."""


class Engine:
    """The steps of one rank for inputs of one signature.

    The first step includes the metadata exchange, along with the first microbatch of each form. A form has runners and
    channels of its own, and the stages of its graph. All graphs make the actions of one schedule; a transfer that the
    graph of a microbatch does not have is left out on both ranks.

    Args:
        config: settings of the steps.
        graphs: this rank's stages, by number, for each graph of a step.
        transport: the transfers to other ranks; ``None`` when this rank has all stages.
        actions: the actions of this rank, sends and receives included.
        releases: for each compute action in order, the sends that are finished after it.
        recorder: collects the times of this rank's actions; ``None`` records nothing, at no cost.
        shards: of this rank's parameters; ``None`` where they are whole.

    Attributes:
        device: of the stages.
        is_lazy: ``True`` if the device compiles the operations of an action to a graph.
        timer: the share of the last step in which this rank computed.
        last_backwards: the last backward of each stage of a training step, in the order of the actions.
        microbatches: of each action, in the order of the numbers on the board.
    """

    def __init__(
        self,
        config: EngineConfig,
        graphs: Sequence[Mapping[int, StageProgram]],
        transport: Transport | None,
        actions: Sequence[Action],
        releases: Sequence[Sequence[Action]],
        recorder: StepRecorder | None = None,
        shards: ActionShards | None = None,
    ) -> None:
        self._config = config
        self._shards = shards
        self._transport = transport
        self._recorder = recorder
        self.device = device_of(config.device)
        self.is_lazy = self.device.is_lazy
        self.timer = StepTimer(config.device)
        # By stage and form.
        self._channels_in: dict[tuple[int, int], dict[int, Channel]] = {}
        self._channels_out: dict[tuple[int, int], dict[int, Channel]] = {}
        self._runners: dict[tuple[int, int], StageRunner] = {}
        channels = StageChannels(config, transport, recorder)
        splits = any(action.kind is ActionKind.INPUT_GRADIENT for action in actions)
        if splits:
            warn_of_hidden_hooks()
        for program in (programs[stage] for programs in graphs for stage in sorted(programs)):
            if shards is not None:
                for module in (program.module, program.first_run):
                    if module is not None:
                        shards.add_program(module)
            self.device.expect_updates((*program.module.parameters(), *program.module.buffers()))
        for stage in sorted(graphs[0]):
            for form in sorted({0, *config.forms}):
                key, program = (stage, form), graphs[config.graphs[form] if config.graphs else 0][stage]
                self._channels_in[key] = channels.incoming(program.plan, form)
                self._channels_out[key] = channels.outgoing(program.plan, form)
                self._runners[key] = StageRunner(
                    program,
                    list(self._channels_in[key].values()),
                    list(self._channels_out[key].values()),
                    config,
                    splits,
                    self.timer,
                )
        self.last_backwards = [
            LastBackward(stage, list({p: None for programs in graphs for p in programs[stage].module.parameters()}))
            for stage in (actions[at].stage for at in sorted(_last_backwards(actions).values()))
        ]
        self._watch: LastBackwardWatch | None = None
        self._calls, self._called_for = self._compile(actions, releases)
        # Without a reference to this engine, which the board would keep alive.
        called_for = self._called_for
        self.microbatches = [action.microbatch for action in called_for]
        self._describe_call = lambda at: _text(called_for[at])

    def run(self, loss: StepLoss, watch: LastBackwardWatch | None = None) -> list[list[Any]]:
        """Run one step; all ranks of the pipeline must call this.

        ``loss`` has the model's inputs of each microbatch, for example ``input_ids`` of (B, T), and their part in the
        loss. ``watch`` is told of each stage's last backward. Returns the last stage's results of each microbatch, in
        order and not scaled, on the rank of that stage, and nothing on others. An exception gets a note with its
        action, is reported to the other ranks, and raised.
        """
        self._watch = watch
        if self.is_lazy:
            # Operations of the program, such as the optimizer's step, are not part of the first action.
            self.device.submit()
        self.timer.start()
        for runner in self._runners.values():
            runner.begin(loss)
        at = 0
        board.describe_action = self._describe_call
        try:
            for at, call in enumerate(self._calls):
                board.action = at
                call()
            self._finish()
        except Exception as error:
            action = self._called_for[at]
            runner = self._runners[self._key(action)]
            note_line(error, runner.module)
            _note(error, action)
            if isinstance(error, IndexError):
                note_ranges(error, loss.microbatches[action.microbatch], runner.program)
            failure_watch.report(error)
            raise
        finally:
            self._watch = None
            board.end_actions()
        self.timer.stop()
        results: dict[int, list[Any]] = {}
        for runner in self._runners.values():
            results |= runner.results
            runner.end()
        return list(map(results.__getitem__, sorted(results)))

    def _finish(self) -> None:
        """Wait until all tensors and objects of the step have been sent."""
        for channels in (*self._channels_in.values(), *self._channels_out.values()):
            for channel in channels.values():
                channel.finish()
        if self._transport is not None:
            self._transport.finish()

    def _key(self, action: Action) -> tuple[int, int]:
        """The stage of ``action`` and the form of its microbatch."""
        forms = self._config.forms
        return action.stage, forms[action.microbatch] if forms else 0

    def _compile(
        self, actions: Sequence[Action], releases: Sequence[Sequence[Action]]
    ) -> tuple[list[Callable[[], None]], list[Action]]:
        """The calls of a step, and the action of each."""
        sends = ((i, action) for i, action in enumerate(actions) if action.kind in _SENDS and self._remote(action))
        last_sends = {(action.stage, action.kind, action.microbatch): i for i, action in sends}
        last_backwards = set(_last_backwards(actions).values())
        computes = {i: action for i, action in enumerate(actions) if action.kind not in (*_RECEIVES, *_SENDS)}
        ends = {action.stage: i for i, action in computes.items()}
        starts = {action.stage: i for i, action in reversed(computes.items())}
        finished = iter(releases)
        calls: list[Callable[[], None]] = []
        called_for: list[Action] = []
        for i, action in enumerate(actions):
            new = self._calls_of(action, last_sends.get((action.stage, action.kind, action.microbatch)) == i)
            if action.kind not in _RECEIVES and action.kind not in _SENDS:
                if self.is_lazy:
                    new = [partial(self._submitted, call) for call in new]
                if self._shards is not None:
                    run = partial(self._shards.run, action.stage, action.kind)
                    new = [partial(run, i == starts[action.stage], i == ends[action.stage], call) for call in new]
                if self._recorder is not None:
                    new = [self._recorder.computing(action, call) for call in new]
                if i in last_backwards:
                    new = [partial(self._watched, action.stage, call) for call in new]
                new += [call for send in next(finished, ()) for call in self._releases(send)]
            calls += new
            called_for += [action] * len(new)
        return calls, called_for

    def _calls_of(self, action: Action, last: bool) -> list[Callable[[], None]]:
        runner, microbatch = self._runners[self._key(action)], action.microbatch
        # Post receives.
        if action.kind in _RECEIVES:
            return [partial(channel.post, _RECEIVES[action.kind], microbatch) for channel in self._remote(action)]
        # Send.
        if action.kind in _SENDS:
            if not self._remote(action):
                return []
            send = runner.send_activation if action.kind is ActionKind.SEND_ACTIVATION else runner.send_gradient
            return [partial(send, microbatch, self._remote(action), last)]
        # Compute.
        computes = {
            ActionKind.FORWARD: runner.forward,
            ActionKind.BACKWARD: runner.backward,
            ActionKind.INPUT_GRADIENT: runner.input_gradient,
            ActionKind.WEIGHT_GRADIENT: runner.weight_gradient,
        }
        return [partial(computes[action.kind], microbatch)]

    def _watched(self, stage: int, backward: Callable[[], None]) -> None:
        """Make the last ``backward`` of ``stage``, between two calls of the watch."""
        if self._watch is None:
            backward()
            return
        self._watch.before_last(stage)
        backward()
        self._watch.after_last(stage)

    def _submitted(self, compute: Callable[[], None]) -> None:
        """Make the call ``compute`` of a lazy device, and start its operations, before another action adds to them."""
        compute()
        self.device.submit()

    def _releases(self, send: Action) -> list[Callable[[], None]]:
        return [partial(channel.release, _SENDS[send.kind], send.microbatch) for channel in self._remote(send)]

    def _remote(self, action: Action) -> list[RemoteChannel]:
        """The channels of a send or receive that have tensors; none for an exchange of another graph only."""
        to_destinations = action.kind in (ActionKind.SEND_ACTIVATION, ActionKind.RECEIVE_GRADIENT)
        channels = (self._channels_out if to_destinations else self._channels_in)[self._key(action)]
        wanted = [each for peer, each in channels.items() if action.peer in (None, peer) and each.boundary.values]
        return [channel for channel in wanted if isinstance(channel, RemoteChannel)]


def _last_backwards(actions: Sequence[Action]) -> dict[int, int]:
    """The index of the last action of each stage that computes gradients."""
    return {action.stage: i for i, action in enumerate(actions) if action.kind in _BACKWARDS}


def _text(action: Action) -> str:
    what = action.kind.name.lower().replace("_", " ")
    return f"stage {action.stage}, {what} of microbatch {action.microbatch}"


def _note(error: Exception, action: Action) -> None:
    error.add_note(f"in the pipeline: {_text(action)} (action {action})")
    if "modified by an inplace operation" in str(error):
        error.add_note(
            "The forward of a later microbatch comes before this backward. If a layer changes a buffer in place there, "
            "assign a new tensor instead (self.std = 0.9 * self.std + ...), or compute with a copy (.clone()). If a "
            "hook of a parameter changes it in the backward, change it after run_train."
        )
