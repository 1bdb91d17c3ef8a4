"""Two mixtures with their experts over ranks; ``python -m tools.zoo experts`` compares all of them."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tools.zoo.experts import LAYOUTS, PLANS, mixtures
from tools.zoo.experts import judge as judge_experts


def test_a_mixture_is_compared_in_each_layout_and_another_is_refused_with_the_reason() -> None:
    """In a new process: the ranks are forks of it."""
    assert "jetmoe" in PLANS
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        right, refused = pool.map(judge_experts, ["causal-lm"] * 2, ["gpt_oss", "jetmoe"], timeout=240)

    assert right.result == "to rounding"
    assert right.words.count("e=") == len(LAYOUTS)
    assert refused.result == "refused"
    assert "a JetMoeParallelExperts, takes inputs, expert_size" in refused.words


def test_types_with_modules_of_experts_are_mixtures() -> None:
    assert mixtures("seq2seq-lm") == ["nemo_speechlm", "nllb-moe", "switch_transformers"]
