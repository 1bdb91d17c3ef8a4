"""A generation over the ranks of a pipeline that are threads of this process."""

import copy
import math
import threading
from collections.abc import Mapping, Sequence
from queue import Queue
from typing import Any

import torch

from nxdpp.generation.batches import GeneratedBatch
from nxdpp.generation.checks import check_arguments
from nxdpp.generation.driver import GenerationDriver
from nxdpp.generation.generating_rank import GeneratingRank
from nxdpp.pipeline.first_partition import first_partition
from nxdpp.pipeline.partition.partition import even
from nxdpp.ranks.wire_form import packed, unpacked
from nxdpp.schedules.placement import Placement
from nxdpp.tracing.graph.trace import TracingOptions
from nxdpp.tracing.modules.layers import find_layer_classes

_CPU = torch.device("cpu")
_SECONDS = 60.0


class _OtherRankFailedError(Exception):
    pass


class _Queues:
    """Messages of one rank; an error of a thread reaches the others in their next receive."""

    def __init__(self, rank: int, ranks: int, queues: dict[tuple[int, int, str], "Queue[Any]"]) -> None:
        self.rank = rank
        self.driver = ranks - 1
        self._ranks = ranks
        self._queues = queues

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        assert type(tensor) is torch.Tensor
        self._queues[self.rank, destination, "values"].put(tensor.clone())

    def receive(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, source: int, on_host: bool = False
    ) -> torch.Tensor:
        tensor: torch.Tensor = self._got(source, "values")
        assert (list(tensor.size()), tensor.dtype) == (list(size), dtype)
        return tensor

    def send_value(self, value: Any, destination: int) -> None:
        self._queues[self.rank, destination, "values"].put(packed(value))

    def receive_value(self, source: int) -> Any:
        return unpacked(self._got(source, "values"))

    def command(self, value: Any) -> None:
        for other in range(self._ranks - 1):
            self._queues[self.rank, other, "commands"].put(packed(value))

    def next_command(self) -> Any:
        return unpacked(self._got(self.driver, "commands"))

    def finish(self) -> None:
        pass

    def fail(self) -> None:
        for (source, _, _), queue in self._queues.items():
            if source == self.rank:
                queue.put(_OtherRankFailedError())

    def _got(self, source: int, kind: str) -> Any:
        value = self._queues[source, self.rank, kind].get(timeout=_SECONDS)
        if isinstance(value, _OtherRankFailedError):
            raise value
        return value


def generate_on_threads(
    model: Any, stages: int, arguments: Mapping[str, Any], transformer_layer_cls: Any = None, **others: Any
) -> list[Any]:
    """Return the result of each rank of a pipeline of ``stages``, the last one of the driver.

    On each rank the parameters of others are not-a-number. Raises the first error of a rank.
    """
    check_arguments(model, None, 1, arguments)
    options = TracingOptions(find_layer_classes(model, transformer_layer_cls))
    partition = first_partition(model, options, stages, even)
    queues: dict[tuple[int, int, str], Queue[Any]] = {
        (source, destination, kind): Queue()
        for source in range(stages)
        for destination in range(stages)
        for kind in ("values", "commands")
    }
    results: list[Any] = [None] * stages
    errors: list[BaseException] = []

    def run(rank: int, own: Any) -> None:
        messages: Any = _Queues(rank, stages, queues)
        try:
            with torch.no_grad():
                one = GeneratingRank(own, "", partition, Placement(stages, 1), messages, _CPU, 1, {})
                if rank == stages - 1:
                    (results[rank],) = GenerationDriver(one, {}, False).generate([GeneratedBatch(dict(arguments))])
                else:
                    (results[rank],) = one.follow(None, False)
        except BaseException as error:
            if not isinstance(error, _OtherRankFailedError):
                errors.append(error)
            messages.fail()

    threads = []
    for rank in range(stages):
        own = copy.deepcopy(model)
        held = {id(p) for name, p in own.named_parameters(remove_duplicate=False) if rank in partition.owners[name]}
        for parameter in own.parameters():
            if id(parameter) not in held and parameter.is_floating_point():
                parameter.data.fill_(math.nan)
        threads.append(threading.Thread(target=run, args=(rank, own)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
