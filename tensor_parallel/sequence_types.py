"""Models whose own ``tp_plan`` gives the numbers of one process under sequence parallelism, by the tests."""

COMPARED_SEQUENCES = frozenset(
    {
        "Gemma2ForCausalLM",
        "GemmaForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    }
)
