"""The output of a batch from those of its microbatches, for values that are rows and that are none."""

import pytest
import torch
from torch import nn

from nxdpp import NxDPPModel, parallel_state
from tests.support.models import make, padded_batch, reference
from tests.support.run_ranks import run_ranks


class Statistics(nn.Module):
    """A model with rows, positions, masks, a temperature and statistics of each microbatch among its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.scale = nn.Parameter(torch.tensor([0.5, 0.7]))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return values of rows (B, 3, 4), some as large as a multiple of the rows."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {
            "rows": x,
            "flat": x.flatten(0, 1),
            "mask": torch.eye(8),
            "square": torch.eye(x.size(1)),
            "on device": torch.eye(8, device=x.device),
            "halves": torch.full((2 * x.shape[0] // 2,), 0.5, dtype=x.dtype),
            "like rows": torch.zeros_like(x[:, 0]),
            "scale": self.scale.exp(),
            "norm": x.square().sum((0, 1)),
            "sum": x.sum(),
        }


def evaluate_rows() -> None:
    model = make("llama")
    whole = reference(model).eval()
    wrapped = NxDPPModel(model, num_microbatches=4).eval()
    tokens = NxDPPModel(make("llama"), num_microbatches=4, loss_normalization="tokens").eval()
    everywhere = NxDPPModel(make("llama"), num_microbatches=4, broadcast_and_average_loss=True).eval()
    last = wrapped.holds_last_stage
    for rows in (10, 3, 8, 1):
        batch = padded_batch(rows)
        ids = {name: batch[name] for name in ("input_ids", "attention_mask")}
        alike = {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}
        with torch.no_grad():
            expected, loss, of_labels = whole(**ids).logits, whole(**alike).loss, whole(**batch).loss
        # The outputs of all rows, in their order.
        for wanted in (True, False):
            output = wrapped.run_eval(**ids, everywhere=wanted)
            assert (output is not None) == (wanted or last)
            if output is not None:
                assert type(output).__name__ == "CausalLMOutputWithPast"
                torch.testing.assert_close(output.logits, expected, rtol=0, atol=1e-6)
        # A mean over rows, and over labels.
        for of_rows in (wrapped.run_eval(**alike, everywhere=True), everywhere.run_eval(**alike)):
            torch.testing.assert_close(of_rows, loss, rtol=0, atol=1e-6)
        own = tokens.run_eval(**batch)
        assert (own is not None) == last
        if own is not None:
            torch.testing.assert_close(own, of_labels, rtol=0, atol=1e-6)
        torch.testing.assert_close(tokens.run_eval(**batch, everywhere=True), of_labels, rtol=0, atol=1e-6)
    with pytest.raises(TypeError, match=r"everywhere=tensor\(1.*\) must be True or False"):
        wrapped.run_eval(**ids, everywhere=torch.tensor(1))
    # A training step takes rows that divide.
    with pytest.raises(ValueError, match=r"a batch of 10 .* run_eval takes any number of rows"):
        wrapped.train().run_train(**padded_batch(10))


def evaluate_statistics() -> None:
    torch.manual_seed(0)
    bare = Statistics()
    whole = reference(bare)
    model = NxDPPModel(bare, num_microbatches=4, transformer_layer_cls=nn.Linear)
    # Microbatches of 8, 3 and 4 rows are as many as values of a mask, tokens and features.
    for rows in (8, 6, 3, 12, 16):
        x = torch.randn(rows, 3, 4, generator=torch.Generator().manual_seed(1))
        output = model.run_eval(x=x, everywhere=True)
        with torch.no_grad():
            expected, parts = whole(x), [whole(each) for each in x.tensor_split(min(rows, 4))]
        for name in expected.keys() - {"norm", "sum"}:
            torch.testing.assert_close(output[name], expected[name], msg=f"{name} of {rows}")
        # A statistic of as many values as a microbatch has rows is taken for them.
        if rows != 16:
            torch.testing.assert_close(output["norm"], [each["norm"] for each in parts])
        torch.testing.assert_close(output["sum"], torch.stack([each["sum"] for each in parts]))


def evaluate_all(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, hang_timeout=60)
    evaluate_rows()
    evaluate_statistics()


def test_any_number_of_rows_is_evaluated_as_in_one_process() -> None:
    run_ranks(2, evaluate_all)


def evaluate_replicas(rank: int) -> None:
    """Each replica gets its own outputs and loss; with an averaged loss that of all replicas."""
    parallel_state.initialize_model_parallel(hang_timeout=60)
    replica = parallel_state.get_data_parallel_rank()
    model = make("llama")
    whole = reference(model).eval()
    own = NxDPPModel(model, num_microbatches=4).eval()
    averaged = NxDPPModel(make("llama"), num_microbatches=4, broadcast_and_average_loss=True).eval()
    for rows in (10, 3):
        batches = [padded_batch(rows, seed=each)["input_ids"] for each in range(2)]
        with torch.no_grad():
            logits = whole(input_ids=batches[replica]).logits
            losses = [whole(input_ids=ids, labels=ids).loss for ids in batches]
        output = own.run_eval(input_ids=batches[replica], everywhere=True)
        torch.testing.assert_close(output.logits, logits, rtol=0, atol=1e-6)
        given = {"input_ids": batches[replica], "labels": batches[replica], "everywhere": True}
        torch.testing.assert_close(own.run_eval(**given), losses[replica], rtol=0, atol=1e-6)
        torch.testing.assert_close(averaged.run_eval(**given), torch.stack(losses).mean(), rtol=0, atol=1e-6)


def test_each_replica_gets_the_outputs_of_its_rows() -> None:
    run_ranks(2, evaluate_replicas)


def want_on_one(rank: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, hang_timeout=60)
    model = NxDPPModel(make("llama"), num_microbatches=2)
    model.run_eval(input_ids=padded_batch(4)["input_ids"], everywhere=rank == 0)


def test_results_that_only_some_ranks_want_everywhere_are_named() -> None:
    with pytest.raises(AssertionError, match=r"run_eval\(everywhere=True\)\n.*run_eval\n.*same inputs"):
        run_ranks(2, want_on_one)
