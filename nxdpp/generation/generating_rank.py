"""One rank of a generation: its forwards, by the commands of the driver."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from nxdpp.generation.absent import mapped
from nxdpp.generation.arguments_sent import SentArguments, on_device
from nxdpp.generation.caches import sizes
from nxdpp.generation.driven_model import make_cache
from nxdpp.generation.known_calls import Plans
from nxdpp.generation.messages import RankMessages
from nxdpp.generation.stage_calls import StageCalls
from nxdpp.generation.turns import set_random_states
from nxdpp.pipeline.partition.partition import Partition
from nxdpp.ranks.faults import failure_watch
from nxdpp.schedules.placement import ListedPlacement, Placement
from nxdpp.tensor.mappings import gather_from_tensor_model_parallel_region_with_dim

_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")

_MANY_TOKENS, _FEW = 256, 3


class GeneratingRank:
    """The forwards of a rank, and what it knows of the arguments of each of ``count`` batches.

    Args:
        root: the whole model. Parameters of other ranks are on the meta device.
        path: the name in it of the model that generates.
        partition: its stages.
        placement: the rank of each stage.
        messages: to the other ranks.
        device: of this rank.
        count: number of batches.
        plans: what earlier forwards have shown, by their kind.
        logits_are_divided: ``True`` if this rank's logits are of its part of the vocabulary.

    Attributes:
        calls: of the modules in its forwards.
    """

    def __init__(
        self,
        root: nn.Module,
        path: str,
        partition: Partition,
        placement: Placement | ListedPlacement,
        messages: RankMessages,
        device: torch.device,
        count: int,
        plans: Plans,
        logits_are_divided: bool = False,
    ) -> None:
        self.module = root.get_submodule(path)
        self.messages = messages
        self.device = device
        self.sent = [SentArguments() for _ in range(count)]
        head: Any = self.module.get_output_embeddings()  # type: ignore[operator]  # of a transformers model
        self.calls = StageCalls(root, partition, placement, messages, device, plans, head)
        self._plans = plans
        self._gathers = messages.rank == messages.driver and logits_are_divided

    def forward(self, path: str, arguments: Mapping[str, Any]) -> Any:
        """Run the module, or the method, of ``path`` on this rank."""
        tensors = {
            name: value for name, value in arguments.items() if isinstance(value, torch.Tensor) and "mask" not in name
        }
        tokens = next((arguments[name] for name in _TOKENS if arguments.get(name) is not None), None)
        given = frozenset(name for name, value in arguments.items() if value is not None)
        kind = path, given, None if tokens is None else _kind_of(*tokens.shape[:2])
        parent, _, name = path.rpartition(".")
        called = getattr(self.module.get_submodule(parent), name) if name else self.module
        if any(value.is_floating_point() for value in tensors.values()):
            # The number of images, and their sizes, may decide which modules run.
            self._plans.pop(kind, None)
        elif kind not in self._plans and not self.module.training and (few := few_tokens(arguments, tokens)):
            # Results of a first forward go to all ranks.
            self.calls.run(kind, called, few, "few tokens")
        output = self.calls.run(kind, called, arguments, tuple((name, each.shape) for name, each in tensors.items()))
        if self._gathers and path == "" and getattr(output, "logits", None) is not None:
            output.logits = gather_from_tensor_model_parallel_region_with_dim(output.logits, -1)
        return output

    def follow(self, streamer: Any, has_equal_random_state: bool) -> list[Any]:
        """Run the driver's commands, until it ends or raises; return its results."""
        with failure_watch.reported():
            while True:
                command = self.messages.next_command()
                _play(streamer, command["events"])
                if command["do"] in ("end", "error"):
                    break
                sent = self.sent[command["batch"]]
                if command["do"] == "cache":
                    sent.keep_caches(make_cache(self.module, command["made"], self.device), is_driver=False)
                else:
                    given = sent.unpacked(command["changes"], command["arguments"], self.device)
                    output = self.forward(command["path"], given)
                    if command["path"] == "":
                        sent.keep_caches(output, is_driver=False)
            self.messages.finish()
        if command["do"] == "error":
            raise command["error"]
        if command["random_state"] is not None and has_equal_random_state:
            set_random_states(self.device, command["random_state"])
        return [mapped(lambda each: on_device(each, self.device), result) for result in command["results"]]


def _play(streamer: Any, events: Sequence[Any]) -> None:
    """Give the calls of the driver's streamer to ``streamer``, if there is one."""
    for value in events if streamer is not None else ():
        if value is None:
            streamer.end()
        else:
            streamer.put(value)


def _kind_of(rows: int, length: int) -> tuple[bool, bool, bool]:
    """Forwards of one kind tell their dimensions apart alike."""
    return rows == 1, length == 1, rows == length


def few_tokens(arguments: Mapping[str, Any], tokens: torch.Tensor | None) -> dict[str, Any]:
    """Return ``arguments`` of a forward for few of its ``tokens`` (B, T), with a cache of its own.

    Empty for few tokens, and for arguments that do not follow the tokens.
    """
    if tokens is None or tokens.dim() != 2 or tokens.numel() <= _MANY_TOKENS or tokens.shape[1] <= _FEW:
        return {}
    few: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape[1] == tokens.shape[1]:
            if value.shape[0] not in (1, tokens.shape[0]):
                return {}
            few[name] = value[:2, :_FEW]
        elif isinstance(value, Cache) and not any(length for length, _ in sizes(value)):
            few[name] = copy.deepcopy(value)
        elif value is None or isinstance(value, bool | int | str):
            few[name] = value
        else:
            return {}
    return few
