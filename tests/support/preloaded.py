"""Modules that the fork server of ``run_ranks`` imports once, for all ranks.

If an import fails, the rank that needs the module raises the error. The garbage collector then leaves the imported
objects alone: a collection in a rank looks at the rank's own objects, and ``gc.get_objects`` returns those.
"""

import gc
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
    "rich.console",
    "rich.table",
    "nxdpp.public",
    "nxdpp.initialization.deferred_init",
    "nxdpp.ranks.parallel_state",
    "nxdpp.pipeline.activation_checkpoint",
    "nxdpp.pipeline.model",
    "nxdpp.checkpoint.huggingface.load",
    "nxdpp.checkpoint.huggingface.save",
)

for name in MODULES:
    with suppress(Exception):
        import_module(name)

with suppress(Exception):
    # A load and a save need hundreds of compiled patterns, which transformers keeps.
    import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")

gc.collect()
gc.freeze()
