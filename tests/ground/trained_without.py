"""Train a small Llama, and call features, where private names have gone. Usage: trained_without.py [PATH ...]

nxdpp is imported after they have gone.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from nxdpp.ground import other_names, torch_names, transformers_names
from nxdpp.ground.names import NameGoneError, PrivateAttribute, PrivateName


def tables() -> Iterator[PrivateName]:
    """Give all private names."""
    for table in (torch_names, transformers_names, other_names):
        yield from (each for each in vars(table).values() if isinstance(each, PrivateName))


class _Gone(PrivateAttribute):
    """A name of a version that does not have it."""

    @property
    def found(self) -> Any:
        raise self.gone()

    def of(self, owner: Any) -> Any:
        raise self.gone()


def results() -> dict[str, str]:
    """Return the loss after two steps, and what each feature does."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import nxdpp

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=2
    )
    nxdpp.parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    model = nxdpp.NxDPPModel(LlamaForCausalLM(config), num_microbatches=4)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.arange(64).view(8, 8) % 30
    for _ in range(2):
        loss = model.run_train(input_ids=ids, labels=ids)
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    found = {"loss": str(float(loss or 0))}
    folder = tempfile.mkdtemp()
    features: dict[str, Callable[[], object]] = {
        "save_checkpoint": lambda: nxdpp.save_checkpoint(folder, tag="a", model=model, optimizer=optimizer),
        "deferred_init": lambda: nxdpp.deferred_init(LlamaForCausalLM, config),
        "fully_shard": lambda: nxdpp.fully_shard(nxdpp.NxDPPModel(LlamaForCausalLM(config))),
        "apply_compile": lambda: nxdpp.apply_compile(model),
        "apply_checkpoint": lambda: nxdpp.apply_checkpoint(model),
        "generate": lambda: model.generate(ids[:1, :4], max_new_tokens=2),
    }
    for feature, call in features.items():
        try:
            call()
            found[feature] = "works"
        except NameGoneError as error:
            found[feature] = f"refused: {error}"
    return found


if __name__ == "__main__":
    for each in tables():
        if each.path in sys.argv[1:]:
            vars(each).pop("of", None)
            each.__class__ = _Gone
    print(json.dumps(results()))
