"""Verification, before each step, that all ranks of a pipeline are about to run the same step on the same inputs.

The message has the step's number, a hash of the graph and of the inputs' signature, and hashes of the inputs' values.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from nxdpp.agreement.difference import difference_of
from nxdpp.agreement.fingerprint import Fingerprint, digest, rank_name
from nxdpp.agreement.input_hash import SLOTS, InputHashes
from nxdpp.agreement.same_values import RankValues, Values
from nxdpp.agreement.step_signature import LastUsed, StepSignature, signature_differences
from nxdpp.ranks.faults.board import board
from nxdpp.ranks.faults.waits import Wait
from nxdpp.ranks.wire_form import packed, unpacked

# Note: agreement of a step
#
# Ranks of a pipeline run different code on different parts of a model. A message of a wrong step has often the right
# shape, and the numbers are then silently wrong. So before each step each rank compares the previous rank's message
# with its own, and then sends its own to the next:
#
#     rank 0 ──numbers──▶ rank 1 ──numbers──▶ rank 2               step of a known signature
#     rank 0 ──numbers, text──▶ rank 1 ──numbers, text──▶ rank 2   step of a signature that is new to the sender
#
# A rank that continues knows that all ranks before it agree, so no tensor is in flight to a rank that expects another.
# A chain and not an all-reduce: the first rank begins its forward without waiting for anybody, and the message travels
# along the pipeline ahead of the first activation: 248 bytes, 150 µs of a 29 ms step on two busy cores.
#
# In every step, since a rank cannot know that another sees its inputs for the first time. Values of inputs are compared
# too (`input_hash`): habits of data parallelism (seed + rank, an unseeded shuffle) give each stage a different batch
# without an error.
#
# A hash says that two ranks differ, a text says in what. The text has parameters, settings, each node with its stage,
# the origin of the initial weights, and in a first step the values (`same_values`). It is sent with a new signature
# alone, and kept, so that a message can show the difference when only one of two ranks knows its signature. A rank that
# drew no random numbers passes on the origin of the ranks before it.
#
# What one rank refuses alone before its first message (a label that is missing, say) the next rank must not take for a
# lost step: `refused` goes with the number of the step, and explains why the numbers differ.
#
# Replicas verify their exchanges on their own (`agreement/exchange.py`), in 16 bytes before each: a backend pairs
# messages by their order only, and the count of an evaluation could meet the count of a training step.

# Above the tags of all other messages of the group.
_TAG = 2**31 - 1
# Number, digest, 1 for a new signature plus 2 in no_sync(), bytes of the text that follows, calls, random generators,
# optimizers; then the hashes of the inputs.
_HEAD = 7
# Added to the third number in no_sync().
_IN_NO_SYNC = 2
_REMEDY = "Wrap the same model with the same arguments on every rank of a pipeline, and give all the same inputs."
_REMEDY_OF_MODES = (
    "Change them on every rank, in the model that was wrapped, which has all parameters and modules on each rank: "
    "model.head.requires_grad_(False). The wrapped model lists only the parameters of this rank."
)
STEP_ON_ALL = (
    "Call optimizer.step() on every rank, or on none. Decide by a value that all ranks have: the loss of "
    "broadcast_and_average_loss=True, or the norm of clip_grad_norm_."
)
OF_A_PART = (
    "An optimizer of a part of the model is made and stepped on every rank, also where its group is empty: "
    "AdamW([{'params': [...]}])."
)
_HABITS = """\
All ranks of a pipeline take the same batch, and only data-parallel replicas take others. Usual causes:
  a seed of each rank (seed + rank): seed by parallel_state.get_data_parallel_rank() in place of the rank.
  DataLoader(shuffle=True) without a seed: give it generator=torch.Generator().manual_seed(seed).
  DistributedSampler(dataset), which splits by ranks: use nxdpp.data_parallel_sampler(dataset).
  a draw on some ranks only (if rank == 0: torch.rand(1)): draw on all, or from a torch.Generator of its own.
  rows drawn by Python's random or numpy, without a seed or where a layer draws from them too: draw the rows from
  random.Random(seed) or numpy.random.default_rng(seed)."""


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
    """Compares the steps of the ranks of one pipeline, each with the previous rank's; ``group`` takes CPU tensors."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._wait = Wait("comparison of the pipeline's steps", group)
        self._origin: str | None = None
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self._heard: LastUsed[int, StepIdentity] = LastUsed()
        self._sends: list[Any] = []
        self._received = torch.empty(_HEAD + 2 * SLOTS, dtype=torch.int64, device="cpu")
        self._sent = torch.empty(_HEAD + 2 * SLOTS, dtype=torch.int64, device="cpu")
        self._text = torch.empty(0, device="cpu")
        self._values = Values()
        self._hooks: dict[int, int] = {}
        self._alike: tuple[int, int] | None = None

    def check(
        self,
        step: StepIdentity,
        step_digest: int,
        is_new: bool,
        inputs: InputHashes = InputHashes(),  # noqa: B008  # immutable
        number: int = 0,
        refused: str | None = None,
        values: RankValues | None = None,
        calls: int = 0,
        leaves_average: bool = False,
        hooks_after: Callable[[dict[int, int]], dict[int, int]] | None = None,
        generators: int = 0,
        optimizers: int = 0,
    ) -> int:
        """Raise ``RuntimeError`` unless the previous rank is about to run the same step.

        All ranks of the pipeline must call this. Returns the ``calls`` of the first rank: how many calls of all ranks
        it has begun, which may differ. A signature that ``is_new`` to this rank must be new to the others too.
        ``number`` is how many steps this rank has begun. ``refused`` is the last step that only this rank may have
        refused; it explains a different number. ``values`` are compared with the ranks before it. ``hooks_after``
        compares the numbers of gradient hooks of tied weights, and returns the numbers for the next rank.
        ``generators`` is a hash of the states of torch's generators, which explains other inputs.
        ``optimizers`` is 0 on a rank without any, or twice their number, plus 1 if one has stepped since the training
        step before. Ranks of as many optimizers must have stepped alike.
        """
        self._origin = step.origin or self._origin
        header = self._sent.numpy()
        board.wait = self._wait
        while self._sends:
            self._sends.pop().wait()
        board.wait = None
        header[:_HEAD] = number, step_digest, is_new + _IN_NO_SYNC * leaves_average, 0, calls, generators, optimizers
        header[_HEAD:] = inputs.words()
        self._values, self._hooks = Values(), {}
        if self._rank > 0:
            self._receive(step, inputs, refused)
        if values is not None:
            self._values = values.after(self._values, self._name)
        if hooks_after is not None:
            self._hooks = hooks_after(self._hooks)
        if self._rank + 1 < self._size:
            self._send(step, is_new or values is not None, refused)
        return int(header[4])

    def _send(self, step: StepIdentity, is_told: bool, refused: str | None) -> None:
        known = (tuple(step.graph), step.signature, self._origin, self._values) if is_told else None
        text = packed((known, refused, self._hooks)) if known or refused or self._hooks else b""
        self._sent[3] = len(text)
        self._sends.append(self._group.send([self._sent], self._rank + 1, _TAG))
        if text:
            self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            self._sends.append(self._group.send([self._text], self._rank + 1, _TAG))

    def _receive(self, step: StepIdentity, inputs: InputHashes, refused: str | None) -> None:
        previous = self._rank - 1
        board.wait = self._wait
        self._group.recv([self._received], previous, _TAG).wait()
        board.wait = None
        theirs, ours = self._received.tolist(), self._sent.tolist()
        length, theirs[3] = theirs[3], 0
        # A call that only one rank has made, and that had no effect on others, shifts no later comparison of calls.
        self._sent[4] = ours[4] = theirs[4]
        states, theirs[5] = (theirs[5], ours[5]), ours[5]
        steps, theirs[6] = (theirs[6], ours[6]), ours[6]
        # A rank that steps no parameters passes on what it has heard.
        self._sent[6] = ours[6] or steps[0]
        refused_there = self._receive_text(theirs[1], length) if length else None
        if theirs == ours:
            self._compare_optimizers(*steps)
            if states[0] == states[1]:
                self._alike = ours[0], ours[5]
            return
        if theirs[0] != ours[0]:
            raise RuntimeError(self._other_number(theirs[0], ours[0], refused_there, refused))
        if theirs[1] != ours[1]:
            raise RuntimeError(self._difference(self._heard.get(theirs[1]), step))
        if theirs[2] // _IN_NO_SYNC != ours[2] // _IN_NO_SYNC:
            inside, outside = (self._rank, previous) if ours[2] >= _IN_NO_SYNC else (previous, self._rank)
            raise RuntimeError(
                f"{self._name(inside)} runs a step in no_sync(), and {self._name(outside)} runs it outside: only some "
                f"gradients would be averaged over the data-parallel replicas. Enter no_sync() on every rank."
            )
        if theirs[2] != ours[2]:
            raise RuntimeError(self._new_on_one(self._heard.get(theirs[1]), step, bool(ours[2] % _IN_NO_SYNC)))
        raise RuntimeError(f"{self._other_inputs(*inputs.different(theirs[_HEAD:]))}{self._moved(*states)}")

    def _compare_optimizers(self, theirs: int, ours: int) -> None:
        if not theirs or not ours or theirs // 2 != ours // 2 or theirs == ours:
            return
        here, there = self._name(self._rank), self._name(self._rank - 1)
        stepped, waiting = (here, there) if ours % 2 else (there, here)
        raise RuntimeError(
            f"an optimizer has stepped on {stepped} since the training step before, and none on {waiting}: the parts "
            f"of the model would be trained by different numbers of steps. {STEP_ON_ALL} {OF_A_PART}"
        )

    def _receive_text(self, step_digest: int, length: int) -> str | None:
        """Receive the previous rank's text; return the step that it refused, if any."""
        text = torch.empty(length, dtype=torch.uint8, device="cpu")
        with self._wait:
            self._group.recv([text], self._rank - 1, _TAG).wait()
        known, refused, self._hooks = unpacked(text.numpy().tobytes())
        if known is not None:
            graph, signature, origin, self._values = known
            self._heard[step_digest] = StepIdentity(Fingerprint(*graph), signature, origin)
            self._compare_origin(origin)
        return refused if isinstance(refused, str) else None

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
        difference = difference_of(there, theirs.graph.lines, here, ours.graph.lines)
        pairs = signature_differences(theirs.signature, ours.signature)
        # Other inputs make another graph.
        if pairs and difference.is_of_graph:
            lines = "".join(f"  {there}: {first}\n  {here}: {second}\n" for first, second in pairs)
            return f"{here} was given other inputs than {there}, or makes another call:\n{lines}{_REMEDY}"
        remedy = _REMEDY_OF_MODES if difference.is_of_modes else _REMEDY
        return f"{here} has {difference.has} than {there}:\n{difference.lines}{remedy}"

    def _new_on_one(self, theirs: StepIdentity | None, ours: StepIdentity, is_here: bool) -> str:
        """Say why a step that both ranks know is new to one of them."""
        previous = self._rank - 1
        here, there = self._name(self._rank), self._name(previous)
        if theirs is not None and difference_of(there, theirs.graph.lines, here, ours.graph.lines).is_of_modes:
            return self._difference(theirs, ours)
        changed, unchanged = (here, there) if is_here else (there, here)
        return (
            f"{changed} has been refreshed, moved or loaded, and {unchanged} has not: their stages would wait for each "
            f"other. Call refresh() on every rank."
        )

    def _other_inputs(self, now: list[str], before: list[str]) -> str:
        here, there = self._name(self._rank), self._name(self._rank - 1)
        what = ", ".join(now) if now else f"{', '.join(before)} in the step before"
        return f"{here} was given other values of {what} than {there}. {_HABITS}"

    def _moved(self, theirs: int, ours: int) -> str:
        """Return a line that tells on which of the two ranks torch's generators have moved."""
        if theirs == ours:
            return ""
        here, there = self._name(self._rank), self._name(self._rank - 1)
        if self._alike is None:
            return f"\ntorch's random generators were never alike on {there} and {here}: they had other seeds or draws."
        step, state = self._alike
        moved = [name for name, digest in ((there, theirs), (here, ours)) if digest != state]
        if len(moved) == 1:
            what = f"only {moved[0]} has drawn from them, or seeded them"
        else:
            what = f"{there} and {here} have drawn other numbers from them"
        return f"\ntorch's random generators were alike in step {step} of both ranks. Since then {what}."

    def _other_number(self, theirs: int, ours: int, refused_there: str | None, refused_here: str | None) -> str:
        here, there = self._name(self._rank), self._name(self._rank - 1)
        refused = [f"  {name}: {text}\n" for name, text in ((there, refused_there), (here, refused_here)) if text]
        return (
            f"{here} begins its step {ours}, and {there} its step {theirs}.\n{''.join(refused)}"
            f"A step is a call of run_train or run_eval. Make each call on every rank of a pipeline. If a program "
            f"catches the error of a step, it must leave the step out on all ranks."
        )

    def _name(self, rank: int) -> str:
        return rank_name(self._group, rank, "pipeline rank")
