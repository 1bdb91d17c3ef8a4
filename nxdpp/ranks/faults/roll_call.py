"""Roll call: each rank tells where it is, and one rank judges whether the job hangs.

======================  ==========================================================  =======================
a rank                  in                                                          judged as
======================  ==========================================================  =======================
waits                   an exchange with other ranks, or the script's collective    not the cause
waits                   any code, while its device waits for a message               not the cause
works                   a step, not in an exchange                                  the cause
compiles                a compiler, up to compile_timeout                           no hang, a notice
is outside              the program's own code, or a call that saves, loads, moves  no hang, a notice
does not answer         stopped by a signal, or gone with its host                  the cause
does not answer, runs   code that holds Python's lock                               no hang, a notice
======================  ==========================================================  =======================

A rank outside of a step may read data, evaluate or write a checkpoint of its own, however long that takes. So the job
ends only when each rank waits, works or cannot answer, and has not moved for the limit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from nxdpp.ranks.faults.board import WORK_BEFORE, Board
from nxdpp.ranks.faults.local_peers import LocalPeers
from nxdpp.ranks.faults.progress import Progress, current_place, script_collective
from nxdpp.ranks.faults.timeouts import Timeouts
from nxdpp.ranks.faults.waits import names

_MOST_STACKS = 4


@dataclass(frozen=True)
class Answer:
    """One rank's answer.

    Attributes:
        state: ``"waits"``, ``"works"`` or ``"outside"``.
        position: the text of its ``Position``.
        is_in_call: ``True`` in a call of nxdpp.
        unmoved_seconds: time since its last move.
        where: the Python code that it is in; may be empty.
        stack: the stack of the thread that trains.
        stopped: ranks of its host whose processes are stopped by a signal.
        running: ranks of its host whose processes run.
        compiling_seconds: time for which it compiles; 0 when it does not.
        waits_in: the exchange that it waits in; empty when it does not wait.
    """

    state: Literal["waits", "works", "outside"]
    position: str
    is_in_call: bool
    unmoved_seconds: float
    where: str
    stack: list[str]
    stopped: list[int]
    running: list[int]
    compiling_seconds: float = 0.0
    waits_in: str = ""


@dataclass(frozen=True)
class Verdict:
    """The judgement of a roll call.

    Attributes:
        hangs: ``True`` if the job has to end.
        rank: the first rank that is the cause; the asking rank if no rank is.
        sentence: the cause, in a line; empty when a rank has moved.
        report: a line for each rank, and stacks.
        stopped: ranks that cannot end themselves.
        reason: why the job continues, where the sentence names a rank that is not the cause.
    """

    hangs: bool
    rank: int
    sentence: str = ""
    report: str = ""
    stopped: tuple[int, ...] = ()
    reason: str = "hang_timeout is a limit for steps"


def own_answer(board: Board, progress: Progress, peers: LocalPeers) -> Answer:
    """This rank's answer."""
    position = board.position()
    place = current_place(board.thread)
    on_device = None if board.stream_waits is None else board.stream_waits.first()
    waits_in = str(board.wait or on_device or script_collective(board.thread))
    return Answer(
        "waits" if waits_in else "works" if position.has_limit else "outside",
        str(position),
        bool(position.call),
        progress.unmoved_seconds,
        "" if place is None else place.where,
        [] if place is None else place.stack,
        peers.stopped(),
        peers.running(),
        progress.compiling_seconds,
        waits_in,
    )


def judge(answers: Mapping[int, Answer], missing: Sequence[int], asking: int, timeouts: Timeouts) -> Verdict:
    """Judge the answers to rank ``asking``, when ranks ``missing`` have not answered."""
    limit = timeouts.hang
    if any(answer.unmoved_seconds < 0.8 * limit for answer in answers.values() if answer.state != "outside"):
        return _moves(answers, asking, timeouts)
    stopped = sorted({rank for answer in answers.values() for rank in answer.stopped} & set(missing))
    running = {rank for answer in answers.values() for rank in answer.running}
    busy = sorted(set(missing) & running - set(stopped))
    gone = sorted(set(missing) - set(busy))
    outside = sorted(rank for rank, answer in answers.items() if answer.state == "outside")
    working = sorted(rank for rank, answer in answers.items() if answer.state == "works")
    waiting = sorted(rank for rank, answer in answers.items() if answer.state == "waits")
    seconds = max((answers[rank].unmoved_seconds for rank in working + waiting), default=limit)
    waiters = f"; {_waits(waiting)}" if waiting else ""
    if gone:
        rank = gone[0]
        how = "is stopped by a signal (SIGSTOP)" if rank in stopped else "does not answer: it or its host is stopped"
        sentence = f"rank {rank} has not moved for {seconds:.0f} s and {how}{waiters}"
    elif outside or busy:
        rank = (outside + busy)[0]
        what = "runs code that holds Python's lock"
        if rank in answers:
            what = f"is {'in ' if answers[rank].is_in_call else ''}{_line(answers[rank])}"
        return Verdict(False, rank, f"rank {rank} {what}{waiters}")
    elif working:
        rank = working[0]
        compiles = f"compiles for longer than compile_timeout={timeouts.compile:g} s"
        does = compiles if answers[rank].compiling_seconds else "hangs"
        sentence = f"rank {rank} {does}: {_line(answers[rank])}{waiters}"
    else:
        before = [rank for rank in waiting if answers[rank].waits_in.startswith(WORK_BEFORE)]
        rank = (before or [asking])[0]
        sentence = f"all ranks wait for each other for {seconds:.0f} s: rank {rank} in {_line(answers[rank])}"
        if before and len(before) < len(waiting):
            others = names(sorted({*waiting} - {*before}))
            sentence += f"; {others} passed it. Let all ranks make the program's collectives"
    report = _report(answers, missing, stopped, working + waiting)
    return Verdict(True, rank, sentence, report, tuple(stopped))


def _moves(answers: Mapping[int, Answer], asking: int, timeouts: Timeouts) -> Verdict:
    """The judgement of a job that moves; it names the rank that compiles while others wait for the limit."""
    compiling = [rank for rank, answer in answers.items() if answer.compiling_seconds]
    waits = (rank for rank, answer in answers.items() if answer.state == "waits")
    waiting = sorted(rank for rank in waits if answers[rank].unmoved_seconds >= timeouts.hang)
    if not compiling or not waiting:
        return Verdict(False, asking)
    rank = max(compiling, key=lambda rank: answers[rank].compiling_seconds)
    sentence = f"rank {rank} compiles: {_line(answers[rank])}; {_waits(waiting)}"
    limit = f"is compile_timeout={timeouts.compile:g} s" if timeouts.compile else "is off (compile_timeout=0)"
    reason = f"the limit of a compilation {limit}"
    return Verdict(False, rank, sentence, reason=reason)


def _waits(ranks: Sequence[int]) -> str:
    return f"{names(ranks)} {'waits' if len(ranks) == 1 else 'wait'} for it"


def _line(answer: Answer) -> str:
    if answer.state == "waits":
        return f"{answer.position}, waits for {answer.unmoved_seconds:.0f} s in {answer.waits_in}"
    if answer.compiling_seconds:
        return f"{answer.position}, for {answer.compiling_seconds:.0f} s"
    where = f", in {answer.where}" if answer.where else ""
    return f"{answer.position}, for {answer.unmoved_seconds:.0f} s{where}"


def _report(answers: Mapping[int, Answer], missing: Sequence[int], stopped: Sequence[int], shown: Sequence[int]) -> str:
    """Positions of all ranks, ranks in the same position on one line, and the stacks of the first of ``shown``."""
    lines = ["no rank has moved; the ranks are in:"]
    ranks_at: dict[str, list[int]] = {}
    for rank in sorted(missing):
        text = "stopped by a signal" if rank in stopped else "no answer"
        ranks_at.setdefault(text, []).append(rank)
    for rank, answer in sorted(answers.items()):
        ranks_at.setdefault(_line(answer), []).append(rank)
    lines += [f"  {names(ranks)}: {text}" for text, ranks in sorted(ranks_at.items(), key=lambda item: item[1])]
    for rank in shown[:_MOST_STACKS]:
        lines += [f"  stack of rank {rank}, the innermost call last:"]
        lines += [f"    {line}" for line in answers[rank].stack]
    return "\n".join(lines)
