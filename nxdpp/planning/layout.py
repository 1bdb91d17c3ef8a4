"""Layout of a job over its devices: sizes of the dimensions, the schedule, and switches. No torch is imported here."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from nxdpp.counted import counted
from nxdpp.schedules.families.registry import FAMILIES, find_family

ZERO_STAGES = (0, 1, 2, 3)
# From this stage on the replicas share parameters too: ``nxdpp.fully_shard``.
SHARDED = 2


def check_zero(zero: int) -> None:
    """Raise ``ValueError`` for any but a stage of ZeRO."""
    if isinstance(zero, bool) or zero not in ZERO_STAGES:
        raise ValueError(f"zero={zero!r} must be one of {', '.join(map(str, ZERO_STAGES))}, a stage of ZeRO.")


# More stages per rank hardly make a bubble smaller, and each has messages of its own.
_MOST_CHUNKS = 8


@dataclass(frozen=True, order=True)
class Layout:
    """One way to place a job on devices. Their number is ``tensor * pipeline * data``.

    Attributes:
        tensor: ranks that share each layer.
        pipeline: ranks of a pipeline.
        data: replicas.
        chunks: stages of a rank.
        schedule: name of a family.
        microbatch: samples of a microbatch.
        checkpoint: layers recompute their forward in the backward.
        zero: stage of ZeRO. 0: each replica has all. 1: ``Zero1Optimizer``, the replicas share the optimizer state. 2:
            ``fully_shard``, they share the parameters too, and gather them once a step. 3: they gather them for each
            microbatch, and reduce its gradients. Half parameters have float32 state from 1 on.
        sequence: the tensor group divides the sequence between linear layers.
        experts: replicas that share the experts of each layer.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    chunks: int = 1
    schedule: str = "1f1b"
    microbatch: int = 1
    checkpoint: bool = False
    zero: int = 0
    sequence: bool = False
    experts: int = 1

    @property
    def copies(self) -> int:
        """Number of replicas with the same experts."""
        return self.data // self.experts

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.tensor * self.pipeline * self.data

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.pipeline * self.chunks

    @property
    def is_sharded(self) -> bool:
        """True if the replicas share the parameters."""
        return self.zero >= SHARDED

    def microbatches(self, global_batch: int) -> int:
        """Return the number of microbatches of a replica in a step.

        Raises ``ValueError`` for a batch that does not divide into them.
        """
        each = self.data * self.microbatch
        if global_batch % each:
            raise ValueError(
                f"a global batch of {global_batch} does not divide over {counted(self.data, 'replica')} in "
                f"microbatches of {self.microbatch}: give a multiple of {each}."
            )
        return global_batch // each

    def check(self) -> None:
        """Raise ``ValueError`` for a schedule that does not exist or does not have these chunks, or for a switch.

        ZeRO does not have such a stage or needs replicas, or sequence parallelism needs a tensor group.
        """
        check_zero(self.zero)
        if self.is_sharded and self.data == 1:
            raise ValueError(
                f"ZeRO-{self.zero} shares parameters among replicas, and there is one: add --data-parallel-size, "
                "or give data > 1."
            )
        if self.sequence and self.tensor == 1:
            raise ValueError(
                "sequence parallelism divides the sequence over the ranks of a tensor group, and the tensor-parallel "
                "size is 1: add --tensor-parallel-size, or leave --sequence-parallel out."
            )
        if self.experts < 1 or self.data % self.experts:
            raise ValueError(
                f"experts are shared by {counted(self.experts, 'replica')}, which must divide the {self.data} of the "
                f"job: give --expert-parallel-size, or experts=, a divisor of {self.data}."
            )
        find_family(self.schedule).placement(self.pipeline, self.chunks)


def groups_of(
    devices: int,
    devices_per_host: int,
    global_batch: int,
    layers: int,
    tensors: Iterable[int],
    is_half: bool = False,
    experts: Sequence[int] = (1,),
) -> Iterator[Layout]:
    """Give all layouts of ``devices`` devices with one schedule each; ``schedules_of`` has the other schedules.

    Args:
        devices: number of devices.
        devices_per_host: a tensor group stays on one host.
        global_batch: samples of a step.
        layers: the most stages of the model: its layers and the head.
        tensors: tensor-parallel sizes to try.
        is_half: ``Zero1Optimizer`` has an effect on one replica too: the float32 state of half parameters.
        experts: numbers of replicas that may share experts.
    """
    for tensor in tensors:
        if devices % tensor or devices_per_host % tensor:
            continue
        for pipeline in divisors(devices // tensor):
            data = devices // tensor // pipeline
            if pipeline > layers or global_batch % data:
                continue
            zeros = ZERO_STAGES if data > 1 else ZERO_STAGES[: 2 if is_half else 1]
            shared = [each for each in experts if data % each == 0]
            switches = product((False, True), zeros, (False, True) if tensor > 1 else (False,), shared)
            for each, microbatch in product(switches, divisors(global_batch // data)):
                yield Layout(tensor, pipeline, data, 1, "1f1b", microbatch, *each)


def schedules_of(pipeline: int, layers: int) -> list[tuple[str, int]]:
    """Return the names of all families with each number of chunks that ``layers`` allow."""
    if pipeline == 1:
        return [("1f1b", 1)]
    found = []
    for family in FAMILIES.values():
        # One chunk of interleaved 1F1B is 1F1B; its like hold for each family with any number of chunks.
        counts = range(2, _MOST_CHUNKS + 1) if family.any_chunks else (family.default_chunks,)
        found += [(family.name, chunks) for chunks in counts if pipeline * chunks <= layers]
    return found


def divisors(number: int) -> list[int]:
    """Return the divisors of ``number`` in order."""
    return [each for each in range(1, number + 1) if number % each == 0]


def describe(layout: Layout) -> str:
    """Return the layout in a few words."""
    switches = [
        name
        for name, is_on in (
            ("activation checkpointing", layout.checkpoint),
            (f"ZeRO-{layout.zero}" if layout.data > 1 else "float32 state", layout.zero > 0),
            ("sequence parallel", layout.sequence),
            (f"experts over {layout.experts} replicas", layout.experts > 1),
        )
        if is_on
    ]
    chunks = f" with {layout.chunks} stages per rank" if layout.chunks > 1 else ""
    return ", ".join(
        [
            f"tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data}",
            f"{layout.schedule}{chunks}",
            f"microbatches of {layout.microbatch}",
            *switches,
        ]
    )
