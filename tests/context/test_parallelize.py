"""What is divided over context ranks, what is refused, and ranks that make other calls."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BartConfig, BartForCausalLM, LlamaConfig, LlamaForCausalLM, TrainingArguments

import nxdpp
from nxdpp import NxDPPModel, context_parallelize, parallel_state
from nxdpp.integrations import PipelineTrainer
from tests.context.test_steps import _made, batch_of
from tests.support.run_ranks import run_ranks

_SMALL: dict[str, Any] = {"vocab_size": 38, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def _message(call: Any) -> str:
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)
    return "nothing was raised"


def _refusals(rank: int) -> list[str]:
    sizes = [
        _message(lambda: parallel_state.initialize_model_parallel(context_parallel_size=3)),
        _message(lambda: parallel_state.initialize_model_parallel(context_parallel_size=2.0)),  # type: ignore[arg-type]
    ]
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    divided = context_parallelize(_made("llama"))
    wrapped = NxDPPModel(divided, num_microbatches=2)
    routed = _made("experts")
    routed.config.output_router_logits = True

    bart = BartForCausalLM(BartConfig(vocab_size=38, d_model=32, decoder_layers=2, decoder_attention_heads=4))
    arguments = TrainingArguments(use_cpu=True, report_to="none")
    odd = LlamaForCausalLM(LlamaConfig(**_SMALL, num_attention_heads=2, num_key_value_heads=2))

    def wrap(**settings: Any) -> Any:
        return lambda: NxDPPModel(context_parallelize(_made("llama")), num_microbatches=2, **settings)

    return [
        *sizes,
        _message(lambda: parallel_state.initialize_model_parallel()),
        _message(lambda: context_parallelize(wrapped)),
        _message(lambda: context_parallelize(divided)),
        _message(lambda: context_parallelize(nn.Linear(2, 2))),
        _message(lambda: context_parallelize(routed)),
        _message(lambda: context_parallelize(bart)),
        _message(lambda: NxDPPModel(odd, num_microbatches=2)),
        _message(wrap(loss_fn=lambda output: output.logits.mean())),
        _message(wrap(gradient_reduction="sum")),
        _message(wrap(check_against_module="first")),
        _message(lambda: wrapped.generate(torch.zeros(1, 1))),
        _message(lambda: nxdpp.apply_compile(wrapped)),
        _message(lambda: nxdpp.tensor_parallelize(_made("llama"), sequence_parallel=True)),
        _message(lambda: nxdpp.neuronx_distributed_config() and nxdpp.initialize_parallel_model({}, lambda: odd)),
        _message(lambda: PipelineTrainer(_made("llama"), arguments)),
        _message(lambda: wrapped.run_train(**batch_of(0, 8), output_router_logits=True)),
    ]


REFUSED = [
    "context_parallel_size=3 must divide the 2 ranks",
    "context_parallel_size=2.0 must be a whole number of at least 1",
    "already initialized with context_parallel_size=2, which differs from context_parallel_size=1",
    "takes a model before it is wrapped, not a NxDPPModel",
    "the sequences of the model are divided already",
    "takes models of transformers, not a Linear",
    "set config.output_router_logits=False",
    "BartForCausalLM does not compute its loss by self.loss_function",
    "the sequences of LlamaForCausalLM are not divided: wrap NxDPPModel(nxdpp.context_parallelize(module), ...)",
    "does not go with loss_fn, which is given the outputs of this rank's tokens",
    "does not go with gradient_reduction='sum'",
    "does not go with check_against_module='first'",
    "generate with context_parallel_size=1",
    "leave apply_compile out",
    "context_parallel_size was not compared with sequence_parallel=True",
    "the trainer divides no sequences",
    "context_parallel_size=2, which PipelineTrainer does not divide sequences over",
    "output_router_logits=True does not go with context_parallelize",
]


def test_what_is_not_supported_is_refused() -> None:
    for messages in run_ranks(2, _refusals):
        assert [text for text, message in zip(REFUSED, messages, strict=True) if text not in message] == []


def _without_context_ranks(rank: int) -> bool:
    parallel_state.initialize_model_parallel()
    model = _made("llama")
    kinds = {type(module) for module in model.modules()}
    return context_parallelize(model) is model and {type(module) for module in model.modules()} == kinds


def test_one_context_rank_leaves_a_model_unchanged() -> None:
    assert run_ranks(2, _without_context_ranks) == [True, True]


def _mistakes(rank: int, case: str) -> None:
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    wrapped = NxDPPModel(context_parallelize(_made("llama")), num_microbatches=2)
    batch = batch_of(rank if case == "batch" else 0, 12 + (rank if case == "length" else 0))
    if case == "evaluation" and rank == 1:
        wrapped.run_eval(**batch)
    wrapped.run_train(**batch)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("batch", "the ranks of a context group were given different batches"),
        ("length", "the ranks of a context group were given different batches"),
        ("evaluation", "evaluation over context ranks.*Make the same calls"),
    ],
)
def test_ranks_that_make_other_calls_are_told(case: str, text: str) -> None:
    with pytest.raises(AssertionError, match=f"(?s)RuntimeError: .*{text}"):
        run_ranks(2, _mistakes, case)


def _saved(rank: int, folder: str) -> dict[str, torch.Tensor]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, context_parallel_size=2)
    wrapped = NxDPPModel(context_parallelize(_made("llama")), num_microbatches=2)
    optimizer = torch.optim.AdamW(wrapped.local_parameters())
    wrapped.run_train(**batch_of(0, 12))
    optimizer.step()
    nxdpp.save_checkpoint(folder, "1", wrapped, optimizer)
    nxdpp.save_pretrained(wrapped, f"{folder}/pretrained")
    return {name: parameter.detach() for name, parameter in wrapped.local_named_parameters()}


def _loaded(rank: int, folder: str) -> dict[str, torch.Tensor]:
    parallel_state.initialize_model_parallel()
    wrapped = NxDPPModel(_made("llama"), num_microbatches=2)
    optimizer = torch.optim.AdamW(wrapped.local_parameters())
    nxdpp.load_checkpoint(folder, "1", wrapped, optimizer)
    return {name: parameter.detach() for name, parameter in wrapped.local_named_parameters()}


def test_checkpoints_do_not_know_the_context_ranks(tmp_path: Path) -> None:
    stages = run_ranks(4, _saved, str(tmp_path))
    (whole,) = run_ranks(1, _loaded, str(tmp_path))
    assert {name for part in stages for name in part} == whole.keys()
    assert all(torch.equal(value, whole[name]) for part in stages for name, value in part.items())
    pretrained = LlamaForCausalLM.from_pretrained(tmp_path / "pretrained", dtype=torch.float64)
    assert all(torch.equal(value, whole[name]) for name, value in pretrained.named_parameters())


def _places(rank: int) -> tuple[Any, ...]:
    parallel_state.initialize_model_parallel(2, context_parallel_size=2)
    sizes = parallel_state.get_context_model_parallel_size(), parallel_state.get_data_parallel_size()
    ranks = parallel_state.get_context_model_parallel_rank(), parallel_state.get_data_parallel_rank()
    groups = parallel_state.get_context_model_parallel_group(), parallel_state.get_data_parallel_group()
    ring = parallel_state.get_context_model_parallel_src_tgt_pairs()
    return sizes, ranks, [torch.distributed.get_process_group_ranks(group) for group in groups], ring


def test_getters_tell_the_ranks_that_share_a_sequence_and_those_with_other_rows() -> None:
    for rank, (sizes, ranks, (context, data), ring) in enumerate(run_ranks(8, _places)):
        assert sizes == (2, 2)
        # Tensor ranks are neighbours, then context ranks.
        assert ranks == (rank // 2 % 2, rank // 4)
        assert context == [each for each in range(8) if (each % 2, each // 4) == (rank % 2, rank // 4)]
        assert data == [each for each in range(8) if each % 4 == rank % 4]
        assert ring == [(context[0], context[1]), (context[1], context[0])]
