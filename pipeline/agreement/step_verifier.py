"""Verification, before each step, that all ranks of a pipeline are about to run the same step.

Each rank compares the previous rank's hash with its own, and then sends its own to the next rank. The hash, 8 bytes,
is of the graph and of the inputs' signature. A rank that goes on knows that all ranks before it agree. No tensor is
then in flight to a rank that expects another::

    rank 0 ──hash──▶ rank 1 ──hash──▶ rank 2               step of a known signature
    rank 0 ──hash, text──▶ rank 1 ──hash, text──▶ rank 2   step of a signature that is new to the sender

The text includes the origin of the initial weights. A rank that drew no random numbers passes on the origin of the
ranks before it. Texts are kept, so that a message can show a difference when one of two ranks knows its signature.
"""

import pickle
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from nxdpp.pipeline.agreement.fingerprint import Fingerprint, digest, rank_name, show_difference
from nxdpp.pipeline.agreement.step_signature import StepSignature, signature_differences
from nxdpp.pipeline.last_used import LastUsed

# Above the tags of all other messages of the group.
_TAG = 2**31 - 1
_REMEDY = "Wrap the same model with the same arguments on every rank of a pipeline, and give all the same inputs."


class StepIdentity(NamedTuple):
    """The step that a rank is about to run: a graph, with inputs of a signature.

    ``origin`` is a line about the random numbers of the rank's initial weights; ``None`` when none were drawn.
    """

    graph: Fingerprint
    signature: StepSignature
    origin: str | None = None

    @property
    def digest(self) -> int:
        """64 bits, a hash of the graph and the signature."""
        both = digest(self.graph.digest + repr(self.signature).encode())
        return int.from_bytes(both, "little", signed=True)


class StepVerifier:
    """Compares the steps of the ranks of one pipeline, each with the previous rank's.

    Args:
        group: a group over the ranks of the pipeline that takes CPU tensors.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._origin: str | None = None
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self._heard: LastUsed[int, StepIdentity] = LastUsed()
        self._sends: list[Any] = []
        # The digest, and the number of bytes of the text that follows.
        self._received = torch.empty(2, dtype=torch.int64)
        self._sent = torch.empty(2, dtype=torch.int64)
        self._text = torch.empty(0)

    def check(self, step: StepIdentity, step_digest: int, is_new: bool) -> None:
        """Raise ``RuntimeError`` unless the previous rank is about to run the same step.

        All ranks of the pipeline must call this. ``is_new``: the signature is new to this rank. It must then be new to
        the other ranks too.
        """
        self._origin = step.origin or self._origin
        if self._rank > 0:
            self._receive(step, step_digest, is_new)
        if self._rank + 1 < self._size:
            self._send(step, step_digest, is_new)

    def _send(self, step: StepIdentity, step_digest: int, is_new: bool) -> None:
        while self._sends:
            self._sends.pop().wait()
        text = pickle.dumps((tuple(step.graph), step.signature, self._origin)) if is_new else b""
        header = self._sent.numpy()
        header[0], header[1] = step_digest, len(text)
        self._sends.append(self._group.send([self._sent], self._rank + 1, _TAG))
        if text:
            self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            self._sends.append(self._group.send([self._text], self._rank + 1, _TAG))

    def _receive(self, step: StepIdentity, step_digest: int, is_new: bool) -> None:
        previous = self._rank - 1
        self._group.recv([self._received], previous, _TAG).wait()
        theirs, length = self._received.tolist()
        if length:
            text = torch.empty(length, dtype=torch.uint8)
            self._group.recv([text], previous, _TAG).wait()
            graph, signature, origin = pickle.loads(text.numpy().tobytes())
            self._heard[theirs] = StepIdentity(Fingerprint(*graph), signature, origin)
            self._compare_origin(origin)
        if theirs != step_digest:
            raise RuntimeError(self._difference(self._heard.get(theirs), step))
        if bool(length) != is_new:
            changed, unchanged = (self._rank, previous) if is_new else (previous, self._rank)
            raise RuntimeError(
                f"{self._name(changed)} has been refreshed, moved or loaded, and {self._name(unchanged)} has not: "
                f"their stages would wait for each other. Call refresh() on every rank."
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

    def _difference(self, theirs: StepIdentity | None, ours: StepIdentity) -> str:
        here, there = self._name(self._rank), self._name(self._rank - 1)
        if theirs is None:
            return f"{here} runs another step than {there}. {_REMEDY}"
        if theirs.graph.digest == ours.graph.digest:
            pairs = signature_differences(theirs.signature, ours.signature)
            lines = "".join(f"  {there}: {first}\n  {here}: {second}\n" for first, second in pairs)
            return f"{here} was given other inputs than {there}, or makes another call:\n{lines}{_REMEDY}"
        lines = show_difference(there, theirs.graph, here, ours.graph)
        return f"{here} has another graph than {there}:\n{lines}{_REMEDY}"

    def _name(self, rank: int) -> str:
        return rank_name(self._group, rank, "pipeline rank")
