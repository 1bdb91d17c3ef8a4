"""Policies: the layouts that they choose; no processes."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import nxdpp
from nxdpp.doors.nnscaler.policies import layout_of
from nxdpp.doors.nnscaler.policy_graph import PolicyGraph
from nxdpp.doors.nnscaler.unit_layout import UnitLayout
from nxdpp.nnscaler import ComputeConfig
from tests.doors.nnscaler.modules import Blocks, sample_of
from tests.support import models


def config(ranks: int, pas_config: dict[str, Any] | None = None, **given: Any) -> ComputeConfig:
    return ComputeConfig(ranks, 8 * ranks, **{"use_end2end": True, **given}, pas_config=pas_config or {})


def chosen(policy: Any, ranks: int, pas_config: dict[str, Any] | None = None, **given: Any) -> UnitLayout:
    module = given.pop("module", None) or Blocks()
    return layout_of(policy, module, sample_of(module), config(ranks, pas_config, **given))


def test_pp_cuts_evenly_over_all_ranks() -> None:
    expected = UnitLayout(pipeline=2, schedule="1f1b", microbatches=4, cuts=("blocks.1",))

    assert chosen("pp", 2, {"pipeline_nmicros": 4}) == expected
    assert chosen("pp", 2, {"pipeline_nmicros": 4, "pipeline_nstages": "auto"}) == expected


def test_hybrid_divides_the_layers_of_each_stage() -> None:
    layout = chosen("hybrid", 4, {"pipeline_nmicros": 2, "pp_size": 2, "pipeline_nstages": 2})

    assert (layout.tensor, layout.pipeline, layout.chunks, layout.cuts) == (2, 2, 1, ("blocks.1",))
    assert layout.plan is not None
    assert layout.plan["blocks.3.down"] == layout.plan["head"] == "colwise_gather_output"


@pytest.mark.parametrize(
    ("scheduler", "stages", "schedule", "chunks"),
    [
        ("1f1b", 2, "1f1b", 1),
        ("gpipe", 2, "gpipe", 1),
        ("1f1b_interleaved", 4, "interleaved", 2),
        ("zb-v", 4, "zb-v", 2),
    ],
)
def test_schedulers(scheduler: str, stages: int, schedule: str, chunks: int) -> None:
    settings = {"pipeline_nmicros": 3, "pipeline_nstages": stages, "pp_size": 2, "pipeline_scheduler": scheduler}
    layout = chosen("hybrid", 2, settings)

    assert (layout.schedule, layout.chunks, layout.microbatches) == (schedule, chunks, 3)
    assert len(layout.cuts) == stages - 1


def test_a_pipeline_needs_an_end_to_end_module() -> None:
    for policy in ("pp", "hybrid"):
        with pytest.raises(ValueError, match="a pipeline needs use_end2end=True"):
            chosen(policy, 2, {}, use_end2end=False)


def test_tp_takes_the_plan_of_the_type_where_there_is_one() -> None:
    llama = models.make("llama")
    assert isinstance(llama, LlamaForCausalLM)
    compute = ComputeConfig(2, 2)

    assert layout_of("tp", llama, models.padded_batch(2), compute) == UnitLayout(tensor=2, plan=None)

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.scale = llama, nn.Linear(3, 4)

    plan = layout_of("tp", Wrapper(), {}, compute).plan
    assert plan == {
        **{f"model.{name}": style for name, style in (nxdpp.tensor_plan(llama) or {}).items()},
        "scale": "colwise_gather_output",
    }


def test_data_shares_the_rows_of_linear_layers() -> None:
    layout = chosen("data", 2, {}, module=Blocks(layers=1))
    assert layout == UnitLayout(tensor=2, plan=dict.fromkeys(("blocks.0.up", "blocks.0.down", "head"), "rows"))


def test_a_function_divides_the_graph() -> None:
    def policy(graph: PolicyGraph, compute_config: ComputeConfig) -> PolicyGraph:
        assert compute_config.plan_ngpus == 4
        assert graph.layers == tuple(f"blocks.{index}" for index in range(4))
        assert len([node for node in graph.nodes if "_blocks_" in node]) == 4
        assert list(graph.costs) == [*graph.layers, "head"]
        graph.divide(2, {"head": "colwise_gather_output"})
        graph.cut_after(graph.layers[2:3])
        compute_config.apply_pipeline_scheduler(graph, 2, 3, "gpipe")
        return graph

    assert chosen(policy, 4) == UnitLayout(
        tensor=2,
        pipeline=2,
        schedule="gpipe",
        microbatches=3,
        cuts=("blocks.2",),
        plan={"head": "colwise_gather_output"},
    )


class Twice(Blocks):
    """Runs its layers twice."""

    def forward(self, sample: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(sample)[0] + super().forward(sample)[0], sample["tokens"]


def test_a_module_without_layers_that_run_once() -> None:
    with pytest.raises(
        ValueError, match=r"no layers of Twice are found .*Run several times.* Use dp or tp, or a policy"
    ):
        chosen("pp", 2, {"pipeline_nmicros": 2}, module=Twice())
    assert chosen("dp", 1, module=Twice()) == UnitLayout()
    assert chosen("tp", 2, module=Twice()).tensor == 2
