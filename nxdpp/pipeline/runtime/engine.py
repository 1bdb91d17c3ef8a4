"""Engine: runs a lowered schedule on one rank. It makes no decisions.

The engine compiles the list of actions once into bound calls. Each step makes these calls in order::

    1RECV_F0   post the receives of activations (B, T, H) of earlier stages     channel.post
    1F0        forward of the stage                                             runner.forward
    1SEND_F0   start to send (B, T, H) to later stages                          runner.send_activation
    1FREE_F0   free a finished send                                             channel.release
    1GATHER0   what takes part beside the stages, such as shards                a call of the participant
    1DISPATCH0 the forward that follows and the backward after it take turns    pair.open
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from nxdpp.devices.kinds import device_of
from nxdpp.gradients.average_plan import LastBackward
from nxdpp.pipeline.backward.structure import warn_of_hidden_hooks
from nxdpp.pipeline.loss.step_loss import StepLoss
from nxdpp.pipeline.p2p.channel import Channel, RemoteChannel
from nxdpp.pipeline.p2p.transport import Direction, Transport
from nxdpp.pipeline.runtime.input_ranges import note_ranges
from nxdpp.pipeline.runtime.overlapped_pair import OverlappedPair
from nxdpp.pipeline.runtime.stage_channels import EngineConfig, StageChannels
from nxdpp.pipeline.runtime.stage_runner import StageRunner
from nxdpp.pipeline.stages.cut_graph import StageProgram
from nxdpp.pipeline.timeline.clock import StepTimer
from nxdpp.pipeline.timeline.step_timeline import StepRecorder
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.board import board
from nxdpp.schedules.actions import BACKWARDS, COMPUTE, TRANSFERS, Action, ActionKind
from nxdpp.schedules.lowering.additions import compute_of
from nxdpp.tracing.code.raised_line import note_line

_RECEIVES = {ActionKind.RECEIVE_ACTIVATION: Direction.ACTIVATION, ActionKind.RECEIVE_GRADIENT: Direction.GRADIENT}
_SENDS = {ActionKind.SEND_ACTIVATION: Direction.ACTIVATION, ActionKind.SEND_GRADIENT: Direction.GRADIENT}
_RELEASES = {ActionKind.RELEASE_ACTIVATION: Direction.ACTIVATION, ActionKind.RELEASE_GRADIENT: Direction.GRADIENT}
_TO_DESTINATIONS = (ActionKind.SEND_ACTIVATION, ActionKind.RELEASE_ACTIVATION, ActionKind.RECEIVE_GRADIENT)


class Engine:
    """The steps of one rank for inputs of one signature.

    The first step includes the metadata exchange, along with the first microbatch of each form. A form has runners and
    channels of its own, and the stages of its graph. All graphs make the actions of one schedule; a transfer that the
    graph of a microbatch does not have is left out on both ranks.

    Args:
        config: settings of the steps.
        graphs: this rank's stages, by number, for each graph of a step.
        transport: the transfers to other ranks; ``None`` when this rank has all stages.
        actions: the actions of this rank (``rank_program``).
        recorder: collects the times of this rank's actions; ``None`` records nothing, at no cost.
        added: by kind, what actions of participants call with the compute action that each belongs to.

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
        recorder: StepRecorder | None = None,
        added: Mapping[ActionKind, Callable[[Action], None]] | None = None,
    ) -> None:
        self._config = config
        self._added = added or {}
        # Where actions run in pairs.
        self._pair: OverlappedPair | None = None
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
            self.device.expect_updates((*program.module.parameters(), *program.module.buffers()))
        for stage in sorted(graphs[0]):
            for form in sorted({0, *config.forms}):
                key, program = (stage, form), graphs[config.graphs[form] if config.graphs else 0][stage]
                self._channels_in[key], self._channels_out[key] = channels.of_stage(program.plan, form)
                self._runners[key] = StageRunner(
                    program,
                    list(self._channels_in[key].values()),
                    list(self._channels_out[key].values()),
                    config,
                    splits,
                    self.timer,
                )
        both = (*self._channels_in.values(), *self._channels_out.values())
        self._channels = [channel for of_stage in both for channel in of_stage.values()]
        last = {action.stage: at for at, action in enumerate(actions) if action.kind in BACKWARDS}
        self.last_backwards = [
            LastBackward(stage, list({p: None for programs in graphs for p in programs[stage].module.parameters()}))
            for stage in sorted(last, key=last.__getitem__)
        ]
        self._calls, self._called_for = self._compile(actions)
        # Without a reference to this engine, which the board would keep alive.
        called_for = self._called_for
        self.microbatches = [action.microbatch for action in called_for]
        self._describe_call = lambda at: _text(called_for[at])

    def run(self, loss: StepLoss) -> list[list[Any]]:
        """Run one step; all ranks of the pipeline must call this.

        ``loss`` has the model's inputs of each microbatch, for example ``input_ids`` of (B, T), and their part in the
        loss. Returns the last stage's results of each microbatch, in order and not scaled, on the rank of that stage,
        and nothing on others. An exception gets a note with its action, is reported to the other ranks, and raised.
        """
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
            # Wait until all tensors and objects of the step have been sent.
            for channel in self._channels:
                channel.finish()
            if self._transport is not None:
                self._transport.finish()
        except Exception as error:
            failed = None if self._pair is None else self._pair.failed
            action = failed or self._called_for[at]
            runner = self._runners[self._key(action)]
            note_line(error, runner.module)
            _note(error, action)
            if isinstance(error, IndexError):
                note_ranges(error, loss.microbatches[action.microbatch], runner.program)
            failure_watch.report(error)
            raise
        finally:
            if self._pair is not None:
                self._pair.abandon()
            board.end_actions()
        self.timer.stop()
        results: dict[int, list[Any]] = {}
        for runner in self._runners.values():
            results |= runner.results
            runner.end()
        return list(map(results.__getitem__, sorted(results)))

    def _key(self, action: Action) -> tuple[int, int]:
        """The stage of ``action`` and the form of its microbatch."""
        forms = self._config.forms
        return action.stage, forms[action.microbatch] if forms else 0

    def _compile(self, actions: Sequence[Action]) -> tuple[list[Callable[[], None]], list[Action]]:
        """The calls of a step, and the action of each."""
        sends = ((at, action) for at, action in enumerate(actions) if action.kind in _SENDS and self._remote(action))
        last_sends = {action[:3]: at for at, action in sends}
        calls: list[Callable[[], None]] = []
        called_for: list[Action] = []
        seconds: set[int] = set()
        for at, action in enumerate(actions):
            new: list[Callable[[], None]]
            if action.kind is ActionKind.DISPATCH:
                first, second = islice((each for each in range(at, len(actions)) if actions[each].kind in COMPUTE), 2)
                seconds.add(second)
                # While the backward runs, the board shows the number of this call.
                action, new = actions[second], [self._opening(actions[first], actions[second], len(calls))]
            elif action.kind is ActionKind.COMBINE:
                new = []
            elif at in seconds:
                assert self._pair is not None, "it has begun"
                new = [self._pair.finish]
            elif action.kind in self._added:
                new = self._recorded(action, [partial(self._added[action.kind], compute_of(actions, at))])
            else:
                new = self._recorded(action, self._calls_of(action, last_sends.get(action[:3]) == at))
            calls += new
            called_for += [action] * len(new)
        return calls, called_for

    def _opening(self, forward: Action, backward: Action, number: int) -> Callable[[], None]:
        """The call that begins a pair; the board shows its ``number``."""
        if self._pair is None:
            self._pair = OverlappedPair(self.device, self._recorder)
        (call,) = self._recorded(backward, self._calls_of(backward, False))
        return partial(self._pair.open, forward, backward, number, call)

    def _recorded(self, action: Action, calls: list[Callable[[], None]]) -> list[Callable[[], None]]:
        return calls if self._recorder is None else [partial(self._recorder.record, action, call) for call in calls]

    def _calls_of(self, action: Action, last: bool) -> list[Callable[[], None]]:
        runner, microbatch = self._runners[self._key(action)], action.microbatch
        # Post receives.
        if action.kind in _RECEIVES:
            return [partial(channel.post, _RECEIVES[action.kind], microbatch) for channel in self._remote(action)]
        # Send, and free what has arrived.
        if action.kind in _SENDS:
            if not self._remote(action):
                return []
            send = runner.send_activation if action.kind is ActionKind.SEND_ACTIVATION else runner.send_gradient
            return [partial(send, microbatch, self._remote(action), last)]
        if action.kind in _RELEASES:
            return [partial(channel.release, _RELEASES[action.kind], microbatch) for channel in self._remote(action)]
        # Compute.
        computes = {
            ActionKind.FORWARD: runner.forward,
            ActionKind.BACKWARD: runner.backward,
            ActionKind.INPUT_GRADIENT: runner.input_gradient,
            ActionKind.WEIGHT_GRADIENT: runner.weight_gradient,
        }
        return [partial(computes[action.kind], microbatch)]

    def _remote(self, action: Action) -> list[RemoteChannel]:
        """The channels of a send or receive that have tensors; none for an exchange of another graph only."""
        channels = (self._channels_out if action.kind in _TO_DESTINATIONS else self._channels_in)[self._key(action)]
        wanted = [each for peer, each in channels.items() if action.peer in (None, peer) and each.boundary.values]
        return [channel for channel in wanted if isinstance(channel, RemoteChannel)]


def _text(action: Action) -> str:
    text = f"stage {action.stage}, {action.kind.name.lower().replace('_', ' ')}"
    # An action of a participant belongs to the stage, but for the one that submits a compute action.
    is_of_one = action.kind in (*COMPUTE, *TRANSFERS, ActionKind.SUBMIT)
    return f"{text} of microbatch {action.microbatch}" if is_of_one else text


def _note(error: Exception, action: Action) -> None:
    error.add_note(f"in the pipeline: {_text(action)} (action {action})")
    if "modified by an inplace operation" in str(error):
        error.add_note(
            "The forward of a later microbatch comes before this backward. If a layer changes a buffer in place there, "
            "assign a new tensor instead (self.std = 0.9 * self.std + ...), or compute with a copy (.clone()). If a "
            "hook of a parameter changes it in the backward, change it after run_train."
        )
