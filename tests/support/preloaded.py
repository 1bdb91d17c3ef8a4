"""Modules that the fork server of ``run_ranks`` imports once, for all ranks.

These are ``MODULES`` and, before its next fork, each module that is named in the file of the variable ``WANTED``. A
name in a module (``transformers:Trainer``) is looked up too: libraries import at the first use. If an import fails, the
rank that needs the module raises the error. The garbage collector then leaves the imported objects alone: a
collection in a rank looks at the rank's own objects, and ``gc.get_objects`` returns those.
"""

import gc
import os
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from tests.support.run_ranks import WANTED

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


def _import_wanted() -> None:
    """Import the modules whose names have come since the last fork of the server."""
    if os.getpid() != _server:
        # A rank forks.
        return
    for name in _wanted.read_text().split():
        if name not in _tried:
            _tried.add(name)
            module, _, member = name.partition(":")
            with suppress(Exception):
                getattr(import_module(module), member or "__name__")
            gc.freeze()


for name in MODULES:
    with suppress(Exception):
        import_module(name)

with suppress(Exception):
    # A load and a save need hundreds of compiled patterns, which transformers keeps.
    import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")

with suppress(Exception):
    # A first trace reads and parses the sources of the model and of torch, which ranks would do each by itself.
    torch, nxdpp, models = map(import_module, ("torch", "nxdpp.public", "tests.support.models"))
    for each in ("llama", "gpt2", "bert"):
        ids = torch.zeros(1, 4, dtype=torch.long)
        nxdpp.trace_layers(models.make(each), {"input_ids": ids, "attention_mask": ids, "labels": ids})
    torch.seed()

gc.collect()
gc.freeze()

if WANTED in os.environ:
    _server, _wanted, _tried = os.getpid(), Path(os.environ[WANTED]), set[str]()
    os.register_at_fork(before=_import_wanted)
