"""Models whose own ``tp_plan`` gives the numbers of one process, by ``python -m tools.zoo tensor``.

The models of ``COMPARED_SEQUENCES`` do so under sequence parallelism too.
"""

from collections.abc import Mapping

from torch import nn

_compared_here: set[tuple[type[nn.Module], frozenset[tuple[str, str]]]] = set()


def note_compared(model_class: type[nn.Module], plan: Mapping[str, str]) -> None:
    """Note that ``plan`` was compared with one process, for models of the class in this process."""
    _compared_here.add((model_class, frozenset(plan.items())))


def is_compared(model_class: type[nn.Module], plan: Mapping[str, str]) -> bool:
    """Return whether ``plan`` was compared in this process."""
    return (model_class, frozenset(plan.items())) in _compared_here


def _for_causal_lm(names: str) -> frozenset[str]:
    return frozenset(f"{name}ForCausalLM" for name in names.split())


COMPARED = _for_causal_lm("""
    AXK1 AXK2 Afmoe Apertus Arcee AriaText BailingHybrid Bamba Beam Cohere2 Cohere2Moe CohereCompass Cohere Cwm Dbrx
    DeepseekV2 DeepseekV32 DeepseekV3 DeepseekV4 DiffLlama Doge Dots1 Dots3Note Emu3 Ernie4_5 Ernie4_5_Moe Exaone4
    ExaoneMoe FalconH1 FlexOlmo Flint GPTNeoX Gemma2 Gemma3 Gemma3n Gemma4 Gemma4Unified Gemma Glm4 Glm4Moe
    Glm4MoeLite Glm GlmMoeDsa GptOss Granite GraniteMoe GraniteMoeHybrid GraniteMoeSWA GraniteMoeShared GraniteSWA
    HYV3 HYV4 Helium HrmText HunYuanDenseV1 HunYuanMoEV1 HyperCLOVAX Inkling2 Inkling Jais2 Jamba KimiLinear
    Kolibri1 Laguna Lfm2 Lfm2Moe Lfm3 Llama4 Llama LongcatFlash Mellum MiMoV2Flash MiniCPM3 MiniMax MiniMaxM2
    MiniMaxM3VL Ministral3 Ministral Mistral Mixtral NanoChat Nemotron NemotronH Olmo2 Olmo3 Olmo OlmoHybrid Olmoe
    Phi3 Phi4Multimodal Phi Phimoe Qwen2 Qwen2Moe Qwen3 Qwen3Moe Qwen3Next Qwen3_5 Qwen3_5Moe Qwen4Exp SeedOss
    SmolLM3 SolarOpen Starcoder2 VaultGemma Youtu
""")


COMPARED_SEQUENCES = _for_causal_lm("""
    Arcee Cohere2 CohereCompass Cohere Cwm Ernie4_5 Exaone4 GPTNeoX Gemma2 Gemma3 Gemma Granite Helium HyperCLOVAX
    Jais2 Llama Ministral3 Ministral Mistral NanoChat Nemotron Olmo Phi Qwen2 Qwen3 SeedOss SmolLM3 Starcoder2
    VaultGemma
""")
