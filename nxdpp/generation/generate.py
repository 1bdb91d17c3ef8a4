"""``generate`` of a pipelined model: transformers' own on one rank, whose forwards run on all ranks of the pipeline.

::

    driver            generate: processors, criteria, sampling, beams        one rank of the last stage
       │ command      inputs of the forward, changes of the caches
       ▼
    all ranks         the model's forward; hidden states go from stage to stage, logits stay on the driver
       ▼
    driver            next token                                             at the end all ranks get the tokens
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from nxdpp.agreement.fingerprint import digest
from nxdpp.generation.absent import mapped
from nxdpp.generation.arguments_sent import SentArguments
from nxdpp.generation.batches import GeneratedBatch, batches_of, joined
from nxdpp.generation.checks import check_arguments, check_same
from nxdpp.generation.driver import driven, make_cache
from nxdpp.generation.leaves import stage_leaves
from nxdpp.generation.messages import RankMessages
from nxdpp.generation.stage_calls import Plan, StageCalls
from nxdpp.generation.streams import RelayedStreamer, play
from nxdpp.generation.turns import Turns
from nxdpp.pipeline.pipeline import Pipeline
from nxdpp.ranks import parallel_state
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.faults.board import board
from nxdpp.ranks.wire_form import packed
from nxdpp.tensor.mappings import gather_from_tensor_model_parallel_region_with_dim

_plans: "WeakKeyDictionary[Pipeline, dict[str, Plan]]" = WeakKeyDictionary()


def generate(pipeline: Pipeline, inputs: Any, num_microbatches: int, arguments: Mapping[str, Any]) -> Any:
    """Generate as ``NxDPPModel.generate``; collective over the pipeline and its tensor groups."""
    parallel_state.refuse_in_debug("generate")
    check_arguments(pipeline.original_module, inputs, num_microbatches, arguments)
    failure_watch.refuse_after_failure()
    pipeline.check_materialised()
    with board.call("generate", "call", "pipeline", has_limit=True), torch.no_grad():
        device = pipeline.device
        batches = batches_of(pipeline.original_module, inputs, num_microbatches, arguments, device)
        last = pipeline.schedule.placement.rank_of(pipeline.partition.stages - 1)
        messages = RankMessages(device, last)
        with failure_watch.reported():
            agreed = check_same(batches, arguments)
        ranks = _GeneratingRank(pipeline, messages, device, len(batches))
        if messages.is_driver:
            results = _Driver(ranks, arguments, agreed.has_streamer).generate(batches)
        else:
            results = ranks.follow(arguments.get("streamer"), agreed.has_equal_random_state)
        return joined(results, pipeline.original_module, inputs, num_microbatches, arguments)


class _GeneratingRank:
    """The forwards of this rank, and what it knows of the arguments of each of ``count`` batches."""

    def __init__(self, pipeline: Pipeline, messages: RankMessages, device: torch.device, count: int) -> None:
        self.module = pipeline.original_module
        self.messages = messages
        self.device = device
        self.sent = [SentArguments() for _ in range(count)]
        placement = pipeline.schedule.placement
        self._calls = StageCalls(
            stage_leaves(self.module, pipeline.partition),
            messages.rank,
            placement.rank_of,
            pipeline.partition.stages,
            messages.driver,
            messages,
            device,
            _plans.setdefault(pipeline, {}),
        )
        self._gathers = messages.rank == messages.driver and _has_divided_logits(self.module)

    def forward(self, path: str, arguments: Mapping[str, Any]) -> Any:
        """Run the module of ``path`` on this rank."""
        shapes = [
            (name, value.shape)
            for name, value in arguments.items()
            if isinstance(value, torch.Tensor) and "mask" not in name
        ]
        output = self._calls.run(path, self.module.get_submodule(path), arguments, tuple(shapes))
        if self._gathers and path == "" and getattr(output, "logits", None) is not None:
            output.logits = gather_from_tensor_model_parallel_region_with_dim(output.logits, -1)
        return output

    def follow(self, streamer: Any, has_equal_random_state: bool) -> list[Any]:
        """Run the driver's commands, until it ends or raises; return its results."""
        with failure_watch.reported():
            while True:
                command = self.messages.next_command()
                play(streamer, command["events"])
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
            torch.set_rng_state(command["random_state"])
        return [mapped(lambda each: _on(each, self.device), result) for result in command["results"]]


class _Driver:
    """The rank that decides: it runs transformers' own ``generate``."""

    def __init__(self, rank: _GeneratingRank, arguments: Mapping[str, Any], has_streamer: bool) -> None:
        self._rank = rank
        self._arguments = dict(arguments)
        self._events: list[Any] = []
        if has_streamer:
            self._arguments["streamer"] = RelayedStreamer(arguments.get("streamer"), self._events)
        self._turns: Turns | None = None
        self._is_in_forward = False

    def generate(self, batches: Sequence[GeneratedBatch]) -> list[Any]:
        """Return the result of each batch, and send its tokens to the other ranks."""
        before = torch.get_rng_state()
        try:
            results = self._results(batches)
            sent = [_without_caches(result) for result in results]
            packed(sent)
        except Exception as error:
            if self._is_in_forward:
                failure_watch.report(error)
                raise
            with failure_watch.reported():
                self._send("error", error=_sendable(error))
                self._rank.messages.finish()
            raise
        after = torch.get_rng_state()
        with failure_watch.reported():
            state = None if torch.equal(before, after) else after
            self._send("end", results=[_tokens_alone(result) for result in sent], random_state=state)
            self._rank.messages.finish()
        return sent

    def _results(self, batches: Sequence[GeneratedBatch]) -> list[Any]:
        tasks = [self._task(number, batch) for number, batch in enumerate(batches)]
        if len(tasks) == 1:
            return [tasks[0]()]
        self._turns = Turns(self._rank.device)
        return self._turns.run(tasks, [batch.seed for batch in batches])

    def _task(self, number: int, batch: GeneratedBatch) -> Callable[[], Any]:
        def run_forward(path: str, arguments: dict[str, Any]) -> Any:
            return self._forward(number, path, arguments)

        def prepare_cache(given: dict[str, Any], made: dict[str, Any]) -> None:
            self._send("cache", batch=number, made=given)
            self._rank.sent[number].keep_caches(made, is_driver=True)

        module = self._rank.module
        model = driven(module, run_forward, prepare_cache, self._rank.device)
        others = {name: value for name, value in self._arguments.items() if name not in batch.arguments}
        return lambda: type(module).generate(model, **batch.arguments, **others)  # type: ignore[attr-defined]

    def _forward(self, number: int, path: str, arguments: dict[str, Any]) -> Any:
        sent = self._rank.sent[number]
        changes, packed_arguments = sent.packed(arguments)
        self._send("forward", batch=number, path=path, changes=changes, arguments=packed_arguments)
        if self._turns is not None:
            self._turns.pass_on()
        self._is_in_forward = True
        output = self._rank.forward(path, arguments)
        self._is_in_forward = False
        if path == "":
            sent.keep_caches(output, is_driver=True)
        return output

    def _send(self, do: str, **content: Any) -> None:
        events = list(self._events)
        self._events.clear()
        self._rank.messages.command({"do": do, "events": events, **content})


def _has_divided_logits(module: nn.Module) -> bool:
    if parallel_state.get_tensor_model_parallel_size() == 1:
        return False
    head = module.get_output_embeddings()  # type: ignore[operator]  # of a transformers model
    return getattr(head, "gather_output", True) is False


def _without_caches(result: Any) -> Any:
    """``result`` without its cache: a rank has only a part of it."""
    if isinstance(result, dict) and result.get("past_key_values") is not None:
        fields = {name: value for name, value in result.items() if name != "past_key_values"}
        return type(result)(**fields)
    return result


def _tokens_alone(result: Any) -> Any:
    """What other ranks get of ``result``: no scores over the vocabulary."""
    if not isinstance(result, dict):
        return result
    names = ("sequences", "sequences_scores", "beam_indices")
    return type(result)(**{name: result[name] for name in names if result.get(name) is not None})


def _sendable(error: Exception) -> Exception:
    try:
        packed(error)
    except (TypeError, ValueError):
        return RuntimeError(f"{type(error).__name__}: {error}")
    kind = type(error)
    is_known = kind.__module__ == "builtins" or kind.__module__.startswith("nxdpp.")
    return error if is_known else RuntimeError(f"{kind.__name__}: {error}")


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value
