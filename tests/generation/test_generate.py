"""A pipeline generates the tokens of one process."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from nxdpp import NxDPPModel, fully_shard, parallel_state, tensor_parallelize
from tests.generation.generated_models import MODELS, prompt, prompt_with_images
from tests.support.models import padded_batch
from tests.support.run_ranks import run_ranks


class Odd(LogitsProcessor):
    """Allows odd tokens."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, ::2] = -torch.inf
        return scores


class LongEnough(StoppingCriteria):
    """Ends a row at 9 tokens."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **others: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 9)


class Collected(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens.append(value.tolist())

    def end(self) -> None:
        self.tokens.append("end")


_MASK = prompt(4).new_ones(4, 7)
_MASK[0, :3] = _MASK[2, :1] = 0

CASES: dict[str, Mapping[str, Any]] = {
    "several samples": {"max_new_tokens": 6, "do_sample": True, "top_k": 0, "num_return_sequences": 3},
    "beams": {"max_new_tokens": 6, "num_beams": 3, "num_return_sequences": 2},
    "padded": {"max_new_tokens": 6, "attention_mask": _MASK},
    "processor": {"max_new_tokens": 6, "logits_processor": [Odd()]},
    "criteria": {"max_new_tokens": 9, "stopping_criteria": StoppingCriteriaList([LongEnough()])},
    "no cache": {"max_new_tokens": 4, "use_cache": False},
    "static cache": {"max_new_tokens": 4, "cache_implementation": "static"},
    "chunks": {"max_new_tokens": 4, "prefill_chunk_size": 3},
    "scores": {"max_new_tokens": 4, "return_dict_in_generate": True, "output_scores": True},
}
KINDS = ("llama", "adapted gpt2", "t5")
_FEW = ("several samples", "padded", "scores")


def cases(kind: str) -> dict[str, Mapping[str, Any]]:
    return {name: case for name, case in CASES.items() if kind == "llama" or name in (*_FEW, "beams")}


def results(generate: Any, kind: str) -> dict[str, Any]:
    found = {}
    for name, case in cases(kind).items():
        torch.manual_seed(3)
        found[name] = generate(prompt(4), **{"pad_token_id": 0, **case})
    return found


def generated(kind: str, **arguments: Any) -> dict[str, Any]:
    """Results of a pipelined model on this rank."""
    model = NxDPPModel(MODELS[kind](), num_microbatches=2, **arguments).eval()
    found = results(model.generate, kind)
    return found | _of_llama(model) if kind == "llama" else found


def on_two_ranks(rank: int) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    return {
        "chat": of_a_chat_model(rank),
        "llama": generated("llama"),
        "adapted gpt2": generated("adapted gpt2", virtual_pipeline_size=2),
        "t5": generated("t5"),
        "llava": of_images(NxDPPModel(MODELS["llava"]()).eval()),
        "trainings": [train_around(generates) for generates in (False, True)],
    }


def on_four_ranks(rank: int) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, tensor_model_parallel_size=2)
    model = NxDPPModel(tensor_parallelize(MODELS["llama"]()), num_microbatches=2).eval()
    found: dict[str, Any] = {"llama": results(model.generate, "few")}
    divided = NxDPPModel(tensor_parallelize(MODELS["llama"](), sequence_parallel=True))
    with pytest.raises(ValueError, match="cannot honour sequence_parallel=True"):
        divided.generate(prompt(2))
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    found["replica"] = replica()
    found["shards"] = [train_sharded(generates) for generates in (False, True)]
    return found


def on_one_rank(rank: int) -> dict[str, Any]:
    """Results of whole models. A device draws other samples than the process of the tests."""
    return {"chat": of_one_chat_model(), **{kind: expected(kind) for kind in KINDS}}


@pytest.fixture(scope="module")
def one_process() -> dict[str, Any]:
    (found,) = run_ranks(1, on_one_rank)
    return found  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(2, on_two_ranks)


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, Any]]:
    return run_ranks(4, on_four_ranks)


def _of_llama(model: Any) -> dict[str, Any]:
    """The tokens and scores that a rank compares with one process itself."""
    found: dict[str, Any] = {}
    long = prompt(4)
    found["parts"] = model.generate(long, num_microbatches=4, max_new_tokens=6)
    found["list"] = model.generate([{"input_ids": rows} for rows in long.split([1, 2, 1])], max_new_tokens=6)
    torch.manual_seed(5)
    found["sampled list"] = model.generate(
        [{"input_ids": rows} for rows in long.split(2)], max_new_tokens=6, do_sample=True
    )
    streamer = Collected() if model.rank == 0 else None
    model.generate(long, max_new_tokens=3, streamer=streamer)
    found["stream"] = streamer and streamer.tokens
    torch.manual_seed(9)
    model.generate(long, max_new_tokens=3, do_sample=True)
    found["random number"] = torch.rand(1).item()
    with torch.autocast(long.device.type, torch.bfloat16):
        found["autocast"] = model.generate(long, max_new_tokens=4)
    refuse(model, long)
    with pytest.raises(ValueError, match="output_attentions=True"):
        model.generate(long, output_attentions=True)
    with pytest.raises(ValueError, match="different tokens"):
        model.generate(long + model.rank, max_new_tokens=2)
    return found


def refuse(model: Any, ids: torch.Tensor) -> None:
    """Refusals after which all ranks continue."""
    batches = [{"input_ids": rows} for rows in ids.split(2)]
    with pytest.raises(ValueError, match=r"temperature|model_kwargs|unknown_argument"):
        model.generate(batches, max_new_tokens=2, unknown_argument=3)
    with pytest.raises(ValueError, match="a streamer shows one batch"):
        model.generate(batches, max_new_tokens=2, streamer=Collected() if model.rank == 0 else None)
    with pytest.raises(ValueError, match="give do_sample to generate itself"):
        model.generate([{"input_ids": ids, "do_sample": True}], max_new_tokens=2)
    for name, remedy in (("past_key_values", "give all tokens"), ("inputs_embeds", "Give tokens")):
        with pytest.raises(ValueError, match=f"cannot honour {name}: .*{remedy}"):
            model.generate([{"input_ids": ids, name: ids.float()}], max_new_tokens=2)
    with pytest.raises(ValueError, match="cannot honour logits_processor with num_microbatches=2"):
        model.generate(ids, num_microbatches=2, logits_processor=[Odd()])
    with pytest.raises(ValueError, match="cannot honour prompt_lookup_num_tokens=1"):
        model.generate(ids, prompt_lookup_num_tokens=1)
    dtype = torch.bfloat16 if model.rank == 0 else torch.float16
    with pytest.raises(ValueError, match="different settings"), torch.autocast(ids.device.type, dtype):
        model.generate(ids, max_new_tokens=2)
    model.original_module.model.layers[0].self_attn.attention_dropout = 0.1
    model.train()
    with pytest.raises(ValueError, match=r"the dropout of model.layers.0.self_attn in training mode.*model.eval\(\)"):
        model.generate(ids, max_new_tokens=2)
    model.original_module.model.layers[0].self_attn.attention_dropout = 0.0
    model.eval()


def chat_model() -> Any:
    """A model whose own settings sample and pad, as those of published chat models."""
    model = MODELS["llama"]().eval()
    model.generation_config.update(do_sample=True, pad_token_id=0)
    return model


def ending(whole: Any) -> GenerationConfig:
    """Settings by which the rows of ``prompt(4)`` end at different lengths."""
    tokens = whole.generate(prompt(4), max_new_tokens=6, do_sample=False)
    return GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=int(tokens[0, 8]))


def of_a_chat_model(rank: int) -> dict[str, Any]:
    """The tokens of this rank by a given configuration without these settings."""
    model = NxDPPModel(chat_model()).eval()
    torch.manual_seed(5)
    batches = [{"input_ids": rows} for rows in prompt(4).split(2)]
    found = {"list": model.generate(batches, generation_config=GenerationConfig(max_new_tokens=6))}
    found["next number"] = torch.rand(())
    found["parts"] = model.generate(prompt(4), num_microbatches=4, generation_config=ending(chat_model()))
    own: Any = model.original_module.generation_config
    own.guidance_scale = 2.0
    with pytest.raises(ValueError, match=r"cannot honour guidance_scale=2\.0"):
        model.generate(prompt(4), generation_config=GenerationConfig(max_new_tokens=6))
    return found


def of_one_chat_model() -> dict[str, Any]:
    whole, config = chat_model(), GenerationConfig(max_new_tokens=6)
    torch.manual_seed(5)
    seeds = torch.randint(2**63 - 1, (2,)).tolist()
    found: dict[str, Any] = {"next number": torch.rand(()), "list": []}
    for seed, rows in zip(seeds, prompt(4).split(2), strict=True):
        torch.manual_seed(seed)
        found["list"].append(whole.generate(rows, generation_config=config))
    found["parts"] = whole.generate(prompt(4), generation_config=ending(whole))
    return found


def test_settings_of_the_model_count_with_a_given_configuration(
    two_ranks: list[dict[str, Any]], one_process: dict[str, Any]
) -> None:
    of_one = one_process["chat"]
    assert 0 in of_one["parts"][0, 9:]
    for rank in two_ranks:
        assert_equal(rank["chat"], of_one)


def of_images(model: Any) -> list[torch.Tensor]:
    found = [
        model.generate(**prompt_with_images(*images), max_new_tokens=4, num_beams=beams)
        for images in ((1, 1), (2, 1))
        for beams in (1, 2)
    ]
    if isinstance(model, NxDPPModel):
        batches = [prompt_with_images(1, 1), prompt_with_images(2, 1)]
        found += model.generate(batches, max_new_tokens=4)
        with pytest.raises(ValueError, match=r"any number of images \(pixel_values\): give a list"):
            model.generate(**batches[0], num_microbatches=2)
        with pytest.raises(ValueError, match="cannot honour inputs_embeds"):
            model.generate(inputs_embeds=torch.ones(2, 3, 4))
    return found


def test_images_are_encoded_on_the_rank_of_their_modules(two_ranks: list[dict[str, Any]]) -> None:
    of_one = of_images(MODELS["llava"]().eval())
    for rank in two_ranks:
        assert len(rank["llava"]) == 6
        assert all(map(torch.equal, rank["llava"], [*of_one, of_one[0], of_one[2]]))


def expected(kind: str) -> dict[str, Any]:
    whole = MODELS[kind]().eval()
    found = results(whole.generate, kind)
    if kind == "llama":
        long, streamer = prompt(4), Collected()
        found["parts"] = whole.generate(long, max_new_tokens=6)
        found["list"] = [whole.generate(rows, max_new_tokens=6) for rows in long.split([1, 2, 1])]
        torch.manual_seed(5)
        found["sampled list"] = []
        for seed, rows in zip(torch.randint(2**63 - 1, (2,)).tolist(), long.split(2), strict=True):
            torch.manual_seed(seed)
            found["sampled list"].append(whole.generate(rows, max_new_tokens=6, do_sample=True))
        with torch.autocast(long.device.type, torch.bfloat16):
            found["autocast"] = whole.generate(long, max_new_tokens=4)
        whole.generate(long, max_new_tokens=3, streamer=streamer)
        found["stream"] = streamer.tokens
        torch.manual_seed(9)
        whole.generate(long, max_new_tokens=3, do_sample=True)
        found["random number"] = torch.rand(1).item()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_one_process(kind: str, two_ranks: list[dict[str, Any]], one_process: dict[str, Any]) -> None:
    of_one = one_process[kind]
    for of_rank in two_ranks:
        assert_equal(of_rank[kind], of_one)
    first, last = two_ranks
    assert all(map(torch.equal, last[kind]["scores"]["scores"], of_one["scores"]["scores"]))
    assert first[kind]["scores"].get("scores") is None


def test_tensor_ranks_have_the_tokens_of_one_process(
    four_ranks: list[dict[str, Any]], one_process: dict[str, Any]
) -> None:
    of_one = {name: one_process["llama"][name] for name in cases("few")}
    for of_rank in four_ranks:
        assert_equal(of_rank["llama"], of_one)
    for ours, theirs in zip(four_ranks[2]["llama"]["scores"]["scores"], of_one["scores"]["scores"], strict=True):
        # The tensor ranks' sums have a different order.
        assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


def assert_equal(found: Mapping[str, Any], of_one: Mapping[str, Any]) -> None:
    for name, tokens in of_one.items():
        ours = found[name]
        if name == "stream":
            assert ours in (tokens, None)
        elif isinstance(tokens, list):
            assert all(map(torch.equal, ours, tokens)), name
        elif isinstance(tokens, float):
            assert ours == tokens, name
        elif isinstance(tokens, dict):
            assert torch.equal(ours["sequences"], tokens["sequences"]), name
            assert ours.get("past_key_values") is None
        else:
            assert torch.equal(ours, tokens), name


def train_around(generates: bool) -> list[float]:
    """Losses of a training that generates after each step, or does not."""
    torch.manual_seed(1)
    model = NxDPPModel(MODELS["dropped gpt2"](), num_microbatches=2, broadcast_and_average_loss=True)
    optimizer = torch.optim.SGD(model.local_parameters(), lr=0.1)
    found = []
    for step in range(3):
        found.append(model.run_train(**padded_batch(4, seed=step)).item())
        optimizer.step()
        optimizer.zero_grad()
        if generates:
            model.eval()
            states = [vars(module).copy() for module in model.original_module.modules()]
            model.generate(prompt(2), max_new_tokens=3, num_beams=2)
            assert [vars(module) for module in model.original_module.modules()] == states
            model.train()
    return found


def test_a_training_continues_as_without_it(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        first, second = rank["trainings"]
        assert first == second


def replica() -> tuple[torch.Tensor, list[int]]:
    """Tokens of this replica, and its numbers of forwards with and without ``synced_gpus``.

    The replicas end after different numbers of tokens.
    """
    model = NxDPPModel(MODELS["llama"]()).eval()
    number = parallel_state.get_data_parallel_rank()
    calls: list[int] = []
    layer = model.local_module.get_submodule(model.stage_layers[0])
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    forwards = []
    for is_synced in (True, False):
        calls.clear()
        tokens = model.generate(prompt(2, seed=number), max_new_tokens=2 + 3 * number, synced_gpus=is_synced)
        forwards.append(len(calls))
    return tokens, forwards


def test_replicas_end_together(four_ranks: list[dict[str, Any]]) -> None:
    whole = MODELS["llama"]().eval()
    for rank, found in enumerate(four_ranks):
        number = rank % 2
        tokens, _ = found["replica"]
        assert torch.equal(tokens, whole.generate(prompt(2, seed=number), max_new_tokens=2 + 3 * number))
    forwards = [found["replica"][1] for found in four_ranks]
    assert len({synced for synced, _ in forwards}) == 1
    assert {alone for _, alone in forwards} == {2, 5}


def train_sharded(generates: bool) -> tuple[list[torch.Tensor], list[float]]:
    """Tokens between steps, if it ``generates`` then, and losses of a training of sharded replicas."""
    model = NxDPPModel(MODELS["llama"](), num_microbatches=2, broadcast_and_average_loss=True)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.local_parameters(), lr=0.1)
    tokens: list[torch.Tensor] = []
    losses: list[float] = []
    for step in range(3):
        if generates and step != 1:
            model.eval()
            tokens.append(model.generate(prompt(4), max_new_tokens=5))
            model.train()
        losses.append(
            model.run_train(**padded_batch(4, seed=10 * step + parallel_state.get_data_parallel_rank())).item()
        )
        optimizer.step()
        optimizer.zero_grad()
    return tokens, losses


def test_sharded_replicas_generate_and_train_on(four_ranks: list[dict[str, Any]]) -> None:
    of_one = MODELS["llama"]().eval().generate(prompt(4), max_new_tokens=5)
    for rank in four_ranks:
        (_, expected), (tokens, losses) = rank["shards"]
        assert torch.equal(tokens[0], of_one)
        assert torch.equal(tokens[1], four_ranks[0]["shards"][1][0][1])
        assert losses == expected
