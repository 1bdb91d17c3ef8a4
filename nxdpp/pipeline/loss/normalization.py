"""Normalization of the loss: the mean over microbatches, or the mean over all items of the batch.

::

    "microbatch"  mean of the losses of all microbatches and replicas. One without labels is an error.
    "tokens"      sum over the labels of all microbatches and replicas, divided by their number

The items are counted before the step, from the inputs that each rank has. A transformers model divides its sum by
``num_items_in_batch``: it gets the items of an average microbatch, and the step takes the mean. So a loss that is
added to it (a router's) is the mean over microbatches. The loss of other models is the mean over the items that
``count_items_fn`` counts. It is weighted by their share.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import fx, nn

from nxdpp.agreement.exchange import ReplicaExchanges
from nxdpp.pipeline.config import PipelineConfig
from nxdpp.pipeline.loss.item_counts import REMEDY, counted, number_of
from nxdpp.pipeline.loss.step_loss import LABELS_EVERYWHERE, StepLoss, no_label
from nxdpp.pipeline.partition.partition import Partition
from nxdpp.pipeline.stages.cut_graph import CutGraph, StepGraphs
from nxdpp.ranks import parallel_state
from nxdpp.tracing.graph.errors import TracingError
from nxdpp.tracing.graph.trace import TracingOptions, trace
from nxdpp.tracing.models.loss_terms import (
    NUM_ITEMS,
    LossTerm,
    all_terms,
    counts_of,
    labels_of_modules,
    means,
    takes_number_of_items,
)
from nxdpp.tracing.sizes.example_inputs import example_shapes, example_specs
from nxdpp.tracing.sizes.input_specs import InputSpec

_logger = logging.getLogger(__name__)


class LossNormalization:
    """The normalization of one pipeline.

    Args:
        module: the model.
        config: settings of the pipeline.
        exchanges: with the data-parallel replicas.

    Attributes:
        by_keyword: ``True`` if the model divides by a number of items that it is given.
    """

    def __init__(self, module: nn.Module, config: PipelineConfig, exchanges: ReplicaExchanges) -> None:
        self._module, self._config, self._exchanges = module, config, exchanges
        self._rule, self._count_items = config.loss_normalization, config.count_items_fn
        self._loss_spec = config.output_loss_value_spec
        self.is_of_microbatches = self._rule == "microbatch"
        self.by_keyword = self._rule == "tokens" and self._count_items is None
        self._has_warned = False
        self._terms: WeakKeyDictionary[CutGraph, _Terms] = WeakKeyDictionary()

    def prepared(
        self, microbatches: Sequence[Mapping[str, Any]], inputs: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], bool]:
        """Return the microbatches for a trace, and whether the user gave their number of items.

        A model that takes this number gets a Python number. ``inputs`` are the batch's. Raises ``ValueError`` or
        ``TypeError`` for a number of the user that cannot divide a loss.
        """
        given = [microbatch.get(NUM_ITEMS) is not None for microbatch in microbatches]
        if inputs.get(NUM_ITEMS) is not None and not all(given):
            raise ValueError(
                f"split_inputs_fn left {NUM_ITEMS} out. Return it with each microbatch, the number of the whole batch."
            )
        if any(given) and self._count_items is not None:
            raise ValueError(
                f"{NUM_ITEMS} and count_items_fn exclude each other: the model divides by the one, and nxdpp weights "
                f"microbatches by the other. Give one of them."
            )
        if not any(given) and not self.by_keyword:
            return [dict(microbatch) for microbatch in microbatches], False
        with_number = [
            {**microbatch, NUM_ITEMS: number_of(microbatch[NUM_ITEMS], NUM_ITEMS) if own else 1.0}
            for microbatch, own in zip(microbatches, given, strict=True)
        ]
        return with_number, any(given)

    def takes_number(self, cut: CutGraph) -> bool:
        """Return whether the loss of ``cut`` depends on a number of items that is given."""
        return self._known(cut).takes_number

    def is_fed(self, cut: CutGraph) -> bool:
        """Return whether the output of ``cut`` depends on a number of items that is counted before a step."""
        return self.by_keyword and self.takes_number(cut)

    def check_example(self, partition: Partition, options: TracingOptions) -> None:
        """Check, as ``check`` does, the graph for the example inputs of a construction; without one, a step checks."""
        if not self.by_keyword or partition.assumed:
            return
        batch = self._config.partition_batch
        specs = example_specs(self._module, self._config.input_names, batch)
        shapes = example_shapes(self._module, specs, batch)
        try:
            traced = trace(self._module, {**specs, NUM_ITEMS: InputSpec(None, None, float)}, {}, options, shapes)
            cut = CutGraph(traced, partition)
            cut.loss(self._loss_spec)
        except (TracingError, ValueError):
            return
        self.check(cut)

    def check(self, cut: CutGraph) -> None:
        """Raise ``ValueError`` for a graph whose loss does not divide the labels by the number of items it is given."""
        if self.by_keyword:
            self._known(cut).one_that_divides()

    def of_step(
        self,
        graphs: StepGraphs,
        microbatches: list[dict[str, Any]],
        is_given: bool,
        on_host: Sequence[Mapping[str, Any]],
        train: bool = True,
        losses: Sequence[fx.Node | None] = (),
        shares: Sequence[float] | None = None,
    ) -> StepLoss:
        """Return the step's loss; collective over data-parallel replicas unless each microbatch has its mean.

        Args:
            graphs: of the microbatches, which have a loss.
            microbatches: as ``prepared`` returns them.
            is_given: the user gave the number of items.
            on_host: the microbatches before they were moved to the device. Labels in host memory are counted without a
                wait for the device.
            train: ``True`` for a training step, ``False`` for an evaluation. Replicas do not mix them.
            losses: the node of the loss of each graph, by default the node that the loss's spec names.
            shares: the part of each microbatch in the rows of the batch, where it weighs as much.

        Raises ``ValueError`` or ``TypeError``: for a microbatch without labels whose loss would be not-a-number, for
        labels that cannot be counted, and for a batch without items.
        """
        of_graphs = []
        owns = graphs.of_each(on_host) if graphs.numbers else [dict(enumerate(on_host))]
        for number, (cut, own) in enumerate(zip(graphs.cuts, owns, strict=True)):
            loss = losses[number] if losses else None
            of_graphs.append((self._terms.get(cut) or self._known(cut, loss, own, shares), own))
        if not is_given and self._rule == "microbatch":
            empty: dict[int, LossTerm] = {}
            for terms, own in of_graphs:
                for term in terms.means:
                    if without := _without_labels(term, own):
                        reason = no_label(without, len(on_host), term.without_labels)
                        raise ValueError(f"{reason}, and the loss would be 0 / 0. {LABELS_EVERYWHERE}")
                for term in terms.of_modules:
                    empty |= dict.fromkeys(_without_labels(term, own), term)
            return StepLoss(microbatches, empty=empty)
        count, replicas = len(microbatches), parallel_state.get_replica_size()
        if is_given:
            self._check_given(of_graphs, float(on_host[0][NUM_ITEMS]), train)
            return StepLoss(microbatches, [float(replicas)] * count)
        if self._count_items is not None:
            items = counted(self._count_items, on_host)
        else:
            items = [number for terms, own in of_graphs for number in self._labels(terms.one_that_divides(), own)]
        everyones = self._exchanges.gathered(f"number of items {_of(train)}", [math.fsum(items)])
        total = sum(found for (found,) in everyones)
        if total == 0:
            raise ValueError(
                f"no microbatch of the batch has an item ({count * replicas} in all): the loss would be 0 / 0. Leave "
                f"such a batch out, on all replicas."
            )
        if self._count_items is not None:
            return StepLoss(microbatches, [number * replicas / total for number in items])
        average = total / (count * replicas)
        return StepLoss([{**microbatch, NUM_ITEMS: average} for microbatch in microbatches])

    def _known(
        self,
        cut: CutGraph,
        loss: fx.Node | None = None,
        microbatches: Mapping[int, Mapping[str, Any]] | None = None,
        shares: Sequence[float] | None = None,
    ) -> "_Terms":
        """Return the terms of the loss of ``cut``. Its first ``microbatches`` may be worth a warning, once."""
        if cut not in self._terms:
            terms = _Terms.of(cut, cut.loss(self._loss_spec) if loss is None else loss, self._module)
            self._terms[cut] = terms
            if microbatches and self._rule == "microbatch" and not self._has_warned:
                found = (*terms.means, *terms.of_modules)
                self._has_warned = any(_warn_of_means(term, microbatches, shares) for term in found)
        return self._terms[cut]

    def _labels(self, term: LossTerm, microbatches: Mapping[int, Mapping[str, Any]]) -> list[float]:
        known = counts_of(term, microbatches)
        if len(known) < len(microbatches):
            raise ValueError(
                f"loss_normalization='tokens': the labels of {term.name} do not follow from the inputs alone, and "
                f"cannot be counted before the step. {REMEDY}"
            )
        return list(known.values())

    def _check_given(
        self, of_graphs: Sequence[tuple["_Terms", Mapping[int, Mapping[str, Any]]]], number: float, train: bool
    ) -> None:
        if not all(terms.takes_number for terms, _ in of_graphs):
            raise ValueError(
                f"the loss of {type(self._module).__name__} does not depend on {NUM_ITEMS}, and would ignore it. Leave "
                f"{NUM_ITEMS} out. loss_normalization='tokens' with count_items_fn gives the mean over all items."
            )
        if parallel_state.get_replica_size() == 1:
            return
        known = 0.0
        for terms, microbatches in of_graphs:
            own = counts_of(terms.dividing[0], microbatches) if terms.dividing else {}
            known += math.fsum(own.values()) if len(own) == len(microbatches) else math.nan
        everyones = self._exchanges.gathered(f"given {NUM_ITEMS} {_of(train)}", [number, known])
        given = [replicas_number for replicas_number, _ in everyones]
        if len(set(given)) > 1 or (number == known != math.fsum(items for _, items in everyones)):
            raise ValueError(
                f"{NUM_ITEMS} must be the number of items of all data-parallel replicas together; they gave "
                f"{[int(each) if each.is_integer() else each for each in given]}. Give the sum; or leave it out, and "
                f"use loss_normalization='tokens', which counts."
            )


def _of(train: bool) -> str:
    return "of a training step" if train else "of an evaluation"


def _without_labels(term: LossTerm, microbatches: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Return the numbers of the microbatches that have no label of ``term``."""
    return [number for number, items in counts_of(term, microbatches).items() if items == 0]


def _warn_of_means(
    term: LossTerm, microbatches: Mapping[int, Mapping[str, Any]], shares: Sequence[float] | None = None
) -> bool:
    """Return whether ``microbatches`` weigh otherwise than by their numbers of labels; rank 0 warns of it."""
    counts = counts_of(term, microbatches)
    found = {*counts.values()}
    if len(found) < 2 or 0 in found:
        return False
    of_a_weight = [items / (shares[number] if shares else 1.0) for number, items in counts.items()]
    if math.isclose(min(of_a_weight), max(of_a_weight)):
        return False
    if dist.get_rank() == 0:
        _logger.warning(
            "the microbatches have %d to %d labels, and each weighs %s in the loss, the mean of their losses. "
            "loss_normalization='tokens' gives the mean over all labels, as in one piece.",
            min(found),
            max(found),
            "as much as its rows" if shares else "the same",
        )
    return True


@dataclass(frozen=True)
class _Terms:
    """Terms of the loss of one graph: means, others that divide by ``num_items_in_batch``, and labels of modules."""

    means: list[LossTerm]
    dividing: list[LossTerm]
    other_means: list[LossTerm]
    of_modules: list[LossTerm]
    takes_number: bool
    model: str

    @classmethod
    def of(cls, cut: CutGraph, loss: fx.Node, module: nn.Module) -> "_Terms":
        terms = [term for term in all_terms(loss, module) if term.ignore_index is not None]
        return cls(
            means(loss, module),
            [term for term in terms if term.divisor is not None],
            [term for term in terms if term.divisor is None],
            labels_of_modules(loss, module),
            takes_number_of_items(loss, cut.traced.layers),
            type(module).__name__,
        )

    def one_that_divides(self) -> LossTerm:
        if len(self.dividing) == 1 and not self.other_means:
            return self.dividing[0]
        if not self.dividing:
            reason = f"does not divide a sum over labels by {NUM_ITEMS}"
        else:
            names = [term.name for term in (*self.dividing, *self.other_means)]
            reason = f"has several terms with labels of their own ({', '.join(names)})"
        raise ValueError(f"loss_normalization='tokens': the loss of {self.model} {reason}. {REMEDY}")
