"""Runs a lowered schedule on one rank. It decides nothing.

The list of actions is compiled once into bound calls, and run step after step::

    1RECV_F0   post the receives of what the earlier stages made        link.post
    1F0        the stage's forward                                      runner.forward
    1SEND_F0   start to send what later stages need                     runner.send_activation
               let go of sends that are known to have arrived           link.release
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from nxdpp.parallel_layers import failure_watch
from nxdpp.pipeline.p2p.boundary import Border, incoming, outgoing
from nxdpp.pipeline.p2p.link import Link, LocalLink, RemoteLink, Stream
from nxdpp.pipeline.p2p.transport import Direction, Transport
from nxdpp.pipeline.runtime.stage_runner import StageRunner
from nxdpp.pipeline.runtime.step_timer import StepTimer
from nxdpp.pipeline.stages.program import StageProgram
from nxdpp.pipeline.timeline.recorder import RecordedLink, StepRecorder
from nxdpp.schedules.actions import Action, ActionKind
from nxdpp.schedules.placement import ListedPlacement, Placement

_RECEIVES = {
    ActionKind.RECEIVE_ACTIVATION: Direction.ACTIVATION,
    ActionKind.RECEIVE_GRADIENT: Direction.GRADIENT,
}
_SENDS = {ActionKind.SEND_ACTIVATION: Direction.ACTIVATION, ActionKind.SEND_GRADIENT: Direction.GRADIENT}


class Engine:
    """The steps of one rank for inputs of one signature.

    In the first step the stages describe to each other what crosses, along with the first microbatch.

    Args:
        programs: this rank's stages, by number.
        placement: which rank has which stage.
        rank: this rank of the pipeline.
        transport: the way to the other ranks; ``None`` where all stages are on this one.
        microbatches: of a step.
        device: where the stages are.
        train: whether backwards follow; the last stage's first result is then the loss.
        keep_outputs: hold sent activations until their backward, as plain autograd would.
        actions: what this rank does, sends and receives included.
        releases: for each compute action in order, the sends that are known to be over after it.
        under_way: how many microbatches a link may have sent one way that are not known to have arrived, before it
            waits for the oldest; ``None`` for any number.
        recorder: collects what this rank does and when; without one nothing is recorded, at no cost.
    """

    def __init__(
        self,
        programs: Mapping[int, StageProgram],
        placement: Placement | ListedPlacement,
        rank: int,
        transport: Transport | None,
        microbatches: int,
        device: torch.device,
        train: bool,
        keep_outputs: bool,
        actions: Sequence[Action],
        releases: Sequence[Sequence[Action]],
        under_way: int | None,
        recorder: StepRecorder | None = None,
    ) -> None:
        self._recorder = recorder
        self._placement = placement
        self._rank = rank
        self._transport = transport
        self._microbatches = microbatches
        self._streams: defaultdict[int, dict[Direction, Stream]] = defaultdict(
            lambda: {direction: Stream() for direction in Direction}
        )
        self._under_way = under_way
        self._device = device
        self.busy_share = 0.0
        local: dict[tuple[int, int], LocalLink] = {}
        splits = any(action.kind is ActionKind.INPUT_GRADIENT for action in actions)
        self._links_in: dict[int, dict[int, Link]] = {}
        self._links_out: dict[int, dict[int, Link]] = {}
        self._runners: dict[int, StageRunner] = {}
        for stage, program in sorted(programs.items()):
            self._links_in[stage] = {b.maker: self._link(b, b.maker, local) for b in incoming(program.plan)}
            self._links_out[stage] = {b.user: self._link(b, b.user, local) for b in outgoing(program.plan)}
            self._runners[stage] = StageRunner(
                program,
                list(self._links_in[stage].values()),
                list(self._links_out[stage].values()),
                device,
                train,
                keep_outputs,
                splits,
            )
        self._calls, self._called_for = self._compile(actions, releases)

    def run(self, inputs: Sequence[dict[str, Any]]) -> list[list[Any]]:
        """One step with the model's inputs for each microbatch; all ranks of the pipeline must call this.

        Returns what the last stage makes of each microbatch, in order, on the rank that has it; nothing on others.
        An exception is noted with the action it came from, told to the other ranks, and raised.
        """
        timer = StepTimer(self._device)
        for runner in self._runners.values():
            runner.begin(inputs, timer)
        at = 0
        try:
            for at, call in enumerate(self._calls):  # noqa: B007
                call()
            self._finish()
        except Exception as error:
            _note(error, self._called_for[at])
            failure_watch.report(error)
            raise
        timer.stop()
        self.busy_share = timer.busy_share
        results: dict[int, list[Any]] = {}
        for runner in self._runners.values():
            results |= runner.results
            runner.end()
        return [results[microbatch] for microbatch in sorted(results)]

    def _finish(self) -> None:
        """Wait until everything has left."""
        for links in (*self._links_in.values(), *self._links_out.values()):
            for link in links.values():
                link.finish()
        if self._transport is not None:
            self._transport.finish()

    def _link(self, border: Border, other: int, local: dict[tuple[int, int], LocalLink]) -> Link:
        peer = self._placement.rank_of(other)
        if peer == self._rank:
            return local.setdefault((border.maker, border.user), LocalLink(border))
        assert self._transport is not None, "other ranks have stages"
        chunks = self._placement.chunks
        pair = self._chunk(border.maker) * chunks + self._chunk(border.user)
        make_link = RemoteLink if self._recorder is None else partial(RecordedLink, self._recorder)
        return make_link(
            border,
            self._transport,
            peer,
            pair,
            chunks * chunks,
            self._microbatches,
            self._streams[peer],
            self._under_way,
        )

    def _chunk(self, stage: int) -> int:
        return self._placement.stages_of(self._placement.rank_of(stage)).index(stage)

    def _compile(
        self, actions: Sequence[Action], releases: Sequence[Sequence[Action]]
    ) -> tuple[list[Callable[[], None]], list[Action]]:
        """The calls of a step, and the action that each is for."""
        last_sends = {(action.stage, action.kind, action.microbatch): i for i, action in enumerate(actions)}
        over = iter(releases)
        calls: list[Callable[[], None]] = []
        called_for: list[Action] = []
        for i, action in enumerate(actions):
            new = self._calls_of(action, last_sends[action.stage, action.kind, action.microbatch] == i)
            if action.kind not in _RECEIVES and action.kind not in _SENDS:
                if self._recorder is not None:
                    new = [self._recorder.computing(action, call) for call in new]
                new += [self._release(send) for send in next(over, ())]
            calls += new
            called_for += [action] * len(new)
        return calls, called_for

    def _calls_of(self, action: Action, last: bool) -> list[Callable[[], None]]:
        runner, microbatch = self._runners[action.stage], action.microbatch
        if action.kind in _RECEIVES:
            links = self._remote(action)
            return [partial(link.post, _RECEIVES[action.kind], microbatch) for link in links]
        if action.kind is ActionKind.SEND_ACTIVATION:
            return [partial(runner.send_activation, microbatch, self._remote(action), last)]
        if action.kind is ActionKind.SEND_GRADIENT:
            return [partial(runner.send_gradient, microbatch, self._remote(action), last)]
        computes = {
            ActionKind.FORWARD: runner.forward,
            ActionKind.BACKWARD: runner.backward,
            ActionKind.INPUT_GRADIENT: runner.input_gradient,
            ActionKind.WEIGHT_GRADIENT: runner.weight_gradient,
        }
        return [partial(computes[action.kind], microbatch)]

    def _release(self, send: Action) -> Callable[[], None]:
        (link,) = self._remote(send)
        return partial(link.release, _SENDS[send.kind], send.microbatch)

    def _remote(self, action: Action) -> list[Link]:
        """The links that a send or receive is about."""
        to_users = action.kind in (ActionKind.SEND_ACTIVATION, ActionKind.RECEIVE_GRADIENT)
        links = (self._links_out if to_users else self._links_in)[action.stage]
        if action.peer is not None:
            return [links[action.peer]]
        return [link for link in links.values() if isinstance(link, RemoteLink)]


def _note(error: Exception, action: Action) -> None:
    what = action.kind.name.lower().replace("_", " ")
    error.add_note(f"in the pipeline: stage {action.stage}, {what} of microbatch {action.microbatch} (action {action})")
