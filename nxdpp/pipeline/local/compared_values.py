"""Values and attributes of a rank's part that the other ranks of a pipeline, and the replicas, compare with theirs."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from nxdpp.agreement.fingerprint import digest
from nxdpp.agreement.plain_attributes import configuration_lines, plain_attributes
from nxdpp.agreement.same_values import InitialWeights, RankValues, sample
from nxdpp.gradients.shards.local_tensors import is_sharded, local_rows
from nxdpp.pipeline.local.tied_weights import TiedWeights
from nxdpp.tracing.modules import listings


class ComparedValues:
    """Values of ``root``, which is whole yet, and of the ``local`` names that ``rank`` keeps.

    Attributes:
        loads: how often ``load_pretrained`` has loaded weights.
        loaded: a hash of the state dicts that were loaded into shards.
        seed: ``torch.initial_seed()`` at construction.
    """

    def __init__(self, root: nn.Module, local: Collection[str], rank: int) -> None:
        self._tree = root
        self._rank = rank
        self._initial = InitialWeights(listings.named_parameters(root), local)
        self._held_rows: dict[str, bytes] = {}
        self._attributes = plain_attributes(root)
        self._configuration = configuration_lines(root)
        self._has_loaded_state = False
        self.loads = 0
        self.loaded = b""
        self.seed = self._initial.seed

    def keep(self, tree: nn.Module) -> None:
        """Compare the values of ``tree`` alone, which is this rank's part of the model."""
        self._tree = tree

    def present(self, ties: TiedWeights) -> RankValues:
        """Return the present values, for a comparison with the other ranks of the pipeline."""
        parameters = dict(listings.named_parameters(self._tree))
        if self.loads:
            # A file may have the very weights that this rank has drawn.
            self._initial.held = {}
        # DTensors count no changes.
        rows = self._samples_of_rows(self._initial.held)
        self._initial.held = {
            name: known for name, known in self._initial.held.items() if rows.get(name) == self._held_rows[name]
        }
        return RankValues(
            *(self._rank, self._initial, parameters, ties.copies(), self.loads, self._has_loaded_state),
            self._attributes,
        )

    def lines(self) -> list[str]:
        """Return a line for each field of a configuration, and each plain attribute, that the replicas compare."""
        return [*self._configuration, *(f"attribute {name} = {value}" for name, value in self._attributes.items())]

    def note_loaded(self, state_dict: Mapping[str, Any]) -> None:
        """Note a load of ``state_dict``, from which each replica of shards takes other rows."""
        self._has_loaded_state = True
        self._initial.held = {name: known for name, known in self._initial.held.items() if name not in state_dict}
        whole = [each for each in state_dict.values() if isinstance(each, torch.Tensor) and not each.is_meta]
        if any(map(is_sharded, self._tree.parameters())):
            self.loaded = digest(self.loaded + b"".join(map(sample, whole)) + b"load")

    def kept(self) -> dict[str, bytes]:
        """Return samples of the initial weights that this rank has as they were, by name."""
        return self._initial.kept(dict(listings.named_parameters(self._tree)))

    def hold(self, kept: Mapping[str, bytes]) -> None:
        """Take the present rows for the initial weights of which there are samples ``kept``, until they change."""
        self._initial.held = dict(kept)
        self._held_rows = self._samples_of_rows(kept)

    def forget(self) -> None:
        """Drop the samples of the initial weights: the ranks have compared them."""
        self._initial.forget()

    def _samples_of_rows(self, names: Collection[str]) -> dict[str, bytes]:
        return {
            name: sample(local_rows(parameter))
            for name, parameter in listings.named_parameters(self._tree)
            if name in names
        }
