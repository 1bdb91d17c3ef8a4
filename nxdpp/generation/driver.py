"""The driver: the rank that runs transformers' own ``generate``, and tells the other ranks each forward."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from nxdpp.generation.batches import GeneratedBatch
from nxdpp.generation.driven_model import driven
from nxdpp.generation.generating_rank import GeneratingRank
from nxdpp.generation.turns import Turns, random_states
from nxdpp.ranks.faults import failure_watch
from nxdpp.ranks.wire_form import packed


class _RelayedStreamer(BaseStreamer):
    """The streamer of the driver: ``own``, if it has one. Its calls are added to ``events`` for the other ranks."""

    def __init__(self, own: Any, events: list[Any]) -> None:
        self._own = own
        self._events = events

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt (B, T) or new tokens (B,)."""
        self._events.append(value)
        if self._own is not None:
            self._own.put(value)

    def end(self) -> None:
        """Take the end of the generation."""
        self._events.append(None)
        if self._own is not None:
            self._own.end()


class GenerationDriver:
    """The driver of a generation: it runs transformers' own ``generate``."""

    def __init__(self, rank: GeneratingRank, arguments: Mapping[str, Any], has_streamer: bool) -> None:
        self._rank = rank
        self._arguments = dict(arguments)
        self._events: list[Any] = []
        if has_streamer:
            self._arguments["streamer"] = _RelayedStreamer(arguments.get("streamer"), self._events)
        self._turns: Turns | None = None
        self._is_in_forward = False
        self._has_sent_forward = False

    def generate(self, batches: Sequence[GeneratedBatch]) -> list[Any]:
        """Return the result of each batch, and send its tokens to the other ranks."""
        before = random_states(self._rank.device)
        try:
            with self._rank.calls.refused():
                results = self._results(batches)
            tokens = [_tokens_only(result) for result in results]
            packed(tokens)
        except Exception as error:
            # Of several batches some are in flight: other ranks have sent what nobody would receive.
            if self._is_in_forward or (self._turns is not None and self._has_sent_forward):
                failure_watch.report(error)
                raise
            with failure_watch.reported():
                self._send("error", error=_sendable(error))
                self._rank.messages.finish()
            raise
        except BaseException as error:
            # The other ranks wait for the next token, whether the program continues or ends.
            failure_watch.report(error)
            raise
        after = random_states(self._rank.device)
        with failure_watch.reported():
            state = None if all(map(torch.equal, before, after)) else after
            self._send("end", results=tokens, random_state=state)
            self._rank.messages.finish()
        return results

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
        self._has_sent_forward = True
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


def _tokens_only(result: Any) -> Any:
    """Return the part of ``result`` for other ranks: no scores over the vocabulary."""
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
