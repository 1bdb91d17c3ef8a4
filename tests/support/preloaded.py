"""What the ranks of a test have in memory before they start: imported once, in the fork server.

A module that cannot be imported is left to the rank that needs it, whose error then says why.
"""

from contextlib import suppress
from importlib import import_module

MODULES = (
    "pytest",
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.fx",
    "transformers",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gemma4.modeling_gemma4",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen3.modeling_qwen3",
    "nxdpp.parallel_layers.parallel_state",
    "nxdpp.pipeline.activation_checkpoint",
    "nxdpp.pipeline.model",
)

for name in MODULES:
    with suppress(Exception):
        import_module(name)
