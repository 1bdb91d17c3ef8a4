"""Verification, before each step, that the ranks of a tensor group run the same step on the same inputs.

They share the layers of a stage, so each must have the whole batch of its replica. The first stage compares; the ranks
of each pipeline compare among themselves (``step_verifier``)::

    tensor rank      0                1
    stage 0          numbers ◀──────▶ numbers       one all-reduce
                        │                │
    stage 1             ▼                ▼          step_verifier

One tensor rank has no such message.
"""

from typing import Any

import torch.distributed as dist

from nxdpp.agreement.comparison import unequal
from nxdpp.agreement.fingerprint import digest
from nxdpp.agreement.input_hash import InputHashes
from nxdpp.agreement.step_signature import StepSignature, signature_differences
from nxdpp.agreement.step_verifier import STEP_ON_ALL
from nxdpp.counted import counted
from nxdpp.ranks.group_values import extremes

_REMEDY = """\
All ranks of a tensor group take the same batch: they share the layers. Feed them by \
nxdpp.data_parallel_sampler(dataset), or by parallel_state.get_data_parallel_rank()."""


def verify_tensor_ranks(
    group: dist.ProcessGroup,
    signature: StepSignature,
    inputs: InputHashes,
    number: int,
    is_new: bool,
    leaves_average: bool,
    generators: int = 0,
    rounds: int = 0,
) -> None:
    """Raise ``RuntimeError`` on all ranks of ``group`` unless they are about to run the same step; collective over it.

    ``group`` has the ranks of a tensor group, for CPU tensors. ``number`` is how many steps this rank has begun,
    ``is_new`` whether the signature is new to it. ``leaves_average`` is ``True`` for a step in ``no_sync()``.
    ``generators`` is a hash of torch's generators, for a model whose layers draw.
    ``rounds`` is how many training steps had a step of an optimizer after them.
    """
    own_kind = repr((signature, is_new, leaves_average, generators, rounds))
    kind = int.from_bytes(digest(own_kind.encode()), "little", signed=True)
    own = [number, kind, *inputs.words()]
    smallest, largest = extremes(own, group, name="comparison of the tensor-parallel ranks' steps")
    if smallest == largest:
        return
    found = unequal((number, signature, leaves_average, is_new, inputs, generators, rounds), group)
    assert found is not None, "the hashes differ"
    raise RuntimeError(_difference(*found.names("tensor-parallel rank"), *found.values))


def _difference(there: str, here: str, first: Any, second: Any) -> str:
    if first[0] != second[0]:
        return (
            f"{here} begins its step {second[0]}, and {there} its step {first[0]}. A step is a call of run_train or "
            f"run_eval. Make each call on every rank of a tensor group."
        )
    if first[1] != second[1]:
        pairs = signature_differences(first[1], second[1])
        lines = "".join(f"  {there}: {theirs}\n  {here}: {ours}\n" for theirs, ours in pairs)
        return f"{here} was given other inputs than {there}, or makes another call:\n{lines}{_REMEDY}"
    if first[2] != second[2]:
        inside, outside = (there, here) if first[2] else (here, there)
        return f"{inside} runs a step in no_sync(), and {outside} runs it outside: enter no_sync() on every rank."
    if first[3] != second[3]:
        changed, unchanged = (there, here) if first[3] else (here, there)
        return f"{changed} has been refreshed, moved or loaded, and {unchanged} has not: call refresh() on every rank."
    if first[5] != second[5]:
        return (
            f"torch's random generators differ between {there} and {here}, whose layers would draw other masks. Give "
            f"torch.manual_seed the same number on all ranks of a tensor group, and draw on all of them or on none."
        )
    if first[6] != second[6]:
        return (
            f"an optimizer has stepped after {counted(first[6], 'training step')} on {there}, and after {second[6]} on "
            f"{here}: the parts of the layers would go apart. {STEP_ON_ALL}"
        )
    now, before = second[4].different(first[4].words())
    names = ", ".join(now) if now else f"{', '.join(before)} in the step before"
    return f"{here} was given other values of {names} than {there}. {_REMEDY}"
