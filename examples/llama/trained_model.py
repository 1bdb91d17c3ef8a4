"""A trained model as a Hugging Face folder, and what it writes when loaded from there."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from corpus import decode
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp import NxDPPModel, parallel_state


def save_checkpoint(model: NxDPPModel, config: LlamaConfig, folder: Path) -> None:
    """Write ``config.json`` and ``model.safetensors`` to ``folder`` from rank 0; collective over all ranks.

    Rank 0 holds the whole model in CPU memory while it writes. Weights keep their names and dtypes; a tied
    weight is written once.
    """
    parts = _gather_states(model)
    if dist.get_rank() != 0:
        return
    with torch.device("meta"):
        whole = LlamaForCausalLM(config)
    whole.load_state_dict({name: weight for part in parts for name, weight in part.items()}, assign=True)
    whole.tie_weights()
    whole.save_pretrained(folder)


def generate_sample(folder: Path, prompt: torch.Tensor, new_bytes: int, seed: int) -> str:
    """Load the checkpoint in ``folder`` and let it continue ``prompt``, int64 byte ids ``[bytes]``.

    Returns the continuation: up to ``new_bytes`` bytes as text, ended early by the config's
    ``eos_token_id``. Not collective.
    """
    # Any: transformers types generate() for a class that its own models do not match.
    model: Any = LlamaForCausalLM.from_pretrained(folder)
    torch.manual_seed(seed)
    tokens = model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt[None]),
        max_new_tokens=new_bytes,
        do_sample=True,
        temperature=0.7,
    )
    return decode(tokens[0, len(prompt) :].tolist())


def _gather_states(model: NxDPPModel) -> list[dict[str, torch.Tensor]]:
    """Every stage's weights, from the first data-parallel replica, in CPU memory; empty but on rank 0."""
    first_replica = parallel_state.get_data_parallel_rank() == 0
    own = {name: weight.cpu() for name, weight in model.local_state_dict().items()} if first_replica else {}
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.gather_object(own, parts if dist.get_rank() == 0 else None)
    return parts
