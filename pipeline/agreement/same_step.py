"""The ranks of a pipeline prove to each other, before each step, that they are about to run the same thing.

Each rank tells the next one 8 bytes, a hash of its graph and of the shapes and dtypes of its inputs, once it has
compared what the one before told it with its own. A rank that goes on therefore knows that all before it agree, and
no tensor is on its way to a rank that expects another::

    rank 0 ──hash──▶ rank 1 ──hash──▶ rank 2       step with inputs that all have seen
    rank 0 ──hash, text──▶ rank 1 ──hash, text──▶ rank 2       step with inputs that the sender sees first

With the text goes what random numbers the values are from, which ranks that drew none pass on from those before.

The texts are kept, so that a difference can be shown when one of the two has seen its inputs before.
"""

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from nxdpp.pipeline.agreement.fingerprint import Fingerprint, differing_lines, digest, fingerprint

# Above the tags of everything else that travels in the group.
_TAG = 2**31 - 1
_TEXTS_KEPT = 1024
_LINES_SHOWN = 4


class Step(NamedTuple):
    """What a rank is about to run: a graph, with inputs of a signature."""

    graph: Fingerprint
    signature: Any

    @property
    def digest(self) -> int:
        """64 bits that say which graph and which signature."""
        both = digest(self.graph.digest + repr(self.signature).encode())
        return int.from_bytes(both, "little", signed=True)


class SameStep:
    """Compares the steps of the ranks of one pipeline, each with the rank before it.

    Args:
        group: a group over the ranks of the pipeline that takes CPU tensors.
        origin: what random numbers this rank's values are from; ``None`` where none were drawn.
    """

    def __init__(self, group: dist.ProcessGroup, origin: str | None = None) -> None:
        self._group = group
        self._origin = origin
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self._heard: dict[int, Step] = {}
        self._sends: list[Any] = []
        # The digest, and how many bytes of text follow.
        self._received = torch.empty(2, dtype=torch.int64)
        self._sent = torch.empty(2, dtype=torch.int64)
        self._text = torch.empty(0)

    def check(self, step: Step, step_digest: int, is_new: bool) -> None:
        """Raise ``RuntimeError`` unless the rank before this one is about to run the same step.

        Collective over the pipeline. ``is_new`` says whether this rank sees such inputs for the first time, as the
        other ranks must, too.
        """
        if self._rank > 0:
            self._hear(step, step_digest, is_new)
        if self._rank + 1 < self._size:
            self._tell(step, step_digest, is_new)

    def _tell(self, step: Step, step_digest: int, is_new: bool) -> None:
        while self._sends:
            self._sends.pop().wait()
        text = pickle.dumps((*step, self._origin)) if is_new else b""
        header = self._sent.numpy()
        header[0], header[1] = step_digest, len(text)
        self._sends.append(self._group.send([self._sent], self._rank + 1, _TAG))
        if text:
            self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            self._sends.append(self._group.send([self._text], self._rank + 1, _TAG))

    def _hear(self, step: Step, step_digest: int, is_new: bool) -> None:
        before = self._rank - 1
        self._group.recv([self._received], before, _TAG).wait()
        theirs, length = self._received.tolist()
        if length:
            text = torch.empty(length, dtype=torch.uint8)
            self._group.recv([text], before, _TAG).wait()
            graph, signature, origin = pickle.loads(text.numpy().tobytes())
            self._remember(theirs, Step(Fingerprint(*graph), signature))
            self._compare_origin(origin)
        if theirs != step_digest:
            raise RuntimeError(self._difference(self._heard.get(theirs), step))
        if bool(length) != is_new:
            news, old = (self._rank, before) if is_new else (before, self._rank)
            raise RuntimeError(
                f"{self._name(news)} has been refreshed, moved or loaded, and {self._name(old)} has not: their stages "
                f"would wait for each other. Call refresh() on every rank."
            )

    def _compare_origin(self, origin: str | None) -> None:
        if self._origin is None:
            self._origin = origin
        elif origin not in (None, self._origin):
            here, there = self._name(self._rank), self._name(self._rank - 1)
            raise RuntimeError(
                f"the parameters of {here} are of other random numbers than those before it:\n  {there}: {origin}\n"
                f"  {here}: {self._origin}\nGive torch.manual_seed the same seed on every rank of a pipeline, before "
                f"the model is built and wrapped."
            )

    def _remember(self, theirs: int, step: Step) -> None:
        self._heard[theirs] = step
        while len(self._heard) > _TEXTS_KEPT:
            del self._heard[next(iter(self._heard))]

    def _difference(self, theirs: Step | None, ours: Step) -> str:
        here, there = self._name(self._rank), self._name(self._rank - 1)
        if theirs is None:
            return f"{here} runs another step than {there}. {_REMEDY}"
        if theirs.graph.digest == ours.graph.digest:
            return (
                f"{here} was given other inputs than {there}:\n  {there}: {theirs.signature}\n"
                f"  {here}: {ours.signature}\n{_REMEDY}"
            )
        return f"{here} has another graph than {there}:\n{_show(there, theirs.graph, here, ours.graph)}{_REMEDY}"

    def _name(self, rank: int) -> str:
        return _name(self._group, rank, "pipeline rank")


_REMEDY = "Wrap the same model with the same arguments on every rank of a pipeline, and give all the same inputs."


def check_replicas(lines: Sequence[str], group: dist.ProcessGroup) -> None:
    """Raise ``RuntimeError`` unless all ranks of the data-parallel ``group`` give the same ``lines``.

    Collective over ``group``; the lines tell the parameters whose gradients are about to be averaged.
    """
    own = fingerprint(lines)
    everybodys: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everybodys, own.digest, group=group)
    if len(set(everybodys)) == 1:
        return
    texts: list[Any] = [None] * len(everybodys)
    dist.all_gather_object(texts, tuple(own), group=group)
    other = next(rank for rank, theirs in enumerate(everybodys) if theirs != everybodys[0])
    first, second = (_name(group, rank, "data-parallel rank") for rank in (0, other))
    raise RuntimeError(
        f"{second} has other parameters than {first}:\n"
        f"{_show(first, Fingerprint(*texts[0]), second, Fingerprint(*texts[other]))}"
        f"Wrap the same model with the same arguments in every data-parallel replica, after the same "
        f"torch.manual_seed(...)."
    )


def _name(group: dist.ProcessGroup, rank: int, what: str) -> str:
    return f"{what} {rank} (rank {dist.get_global_rank(group, rank)})"


def _show(there: str, theirs: Fingerprint, here: str, ours: Fingerprint) -> str:
    text = ""
    for their_line, our_line in differing_lines(theirs.lines, ours.lines, _LINES_SHOWN):
        text += f"  {there}: {their_line or '(no such line)'}\n  {here}: {our_line or '(no such line)'}\n"
    return text
