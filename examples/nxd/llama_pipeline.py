"""The pipeline guide's Llama: tensor-parallel layers, meta device and ``param_init_fn``, cut by ``create_partition``.

torchrun --nproc-per-node 4 examples/nxd/llama_pipeline.py --tensor-parallel-size 2 --pipeline-parallel-size 2
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from parallel_llama import LlamaDecoderLayer, LlamaForCausalLM
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

from nxdpp import NxDPPModel
from nxdpp.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, mappings, parallel_state
from nxdpp.utils.model_utils import init_on_device

VOCABULARY, LENGTH = 64, 16


def train(args: argparse.Namespace) -> list[float]:
    """Train on made-up text; return the loss of each step, equal on all ranks. Collective over all ranks."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_parallel_size,
        pipeline_model_parallel_size=args.pipeline_parallel_size,
    )
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    config.return_dict = False
    torch.manual_seed(args.seed)
    with init_on_device(torch.device("meta")):
        module = LlamaForCausalLM(config, sequence_parallel=args.sequence_parallel)
    model = NxDPPModel(
        module,
        transformer_layer_cls=LlamaDecoderLayer,
        num_microbatches=args.num_microbatches,
        virtual_pipeline_size=1,
        output_loss_value_spec=(True, False),
        input_names=["input_ids", "attention_mask", "labels"],
        pipeline_cuts=create_partition(config, args),
        trace_file_path=args.trace_file_path,
        leaf_module_cls=[LlamaRMSNorm.__name__],
        autowrap_modules=[mappings],
        use_zero1_optimizer=False,
        deallocate_pipeline_outputs=False,
        broadcast_and_average_loss=True,
        param_init_fn=partial(init_weights, config),
    )
    model.move_model_to_device()
    optimizer = torch.optim.AdamW(model.local_parameters(), lr=1e-2)
    losses: list[float] = []
    for ids in data_loader(args):
        loss = model.run_train(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    parallel_state.destroy_model_parallel()
    return losses


def create_partition(config: LlamaConfig, args: argparse.Namespace) -> list[str]:
    """Names of the layers after which the model is cut: as many layers on each rank."""
    layers, ranks = config.num_hidden_layers, args.pipeline_parallel_size
    if layers % ranks:
        raise ValueError(f"{layers} layers do not divide into {ranks} stages of one size")
    return [f"model.layers.{index - 1}" for index in range(layers // ranks, layers, layers // ranks)]


def init_weights(model_config: LlamaConfig, module: Any) -> None:
    """Initialise the parameters of ``module`` itself; each rank does so for its own modules."""
    if isinstance(module, (nn.Linear, Conv1D)):
        module.weight.data.normal_(mean=0.0, std=model_config.initializer_range)
        if module.bias is not None:
            module.bias.data.zero_()
    elif isinstance(module, nn.Embedding):
        module.weight.data.normal_(mean=0.0, std=model_config.initializer_range)
        if module.padding_idx:
            module.weight.data[module.padding_idx].zero_()
    elif isinstance(module, nn.LayerNorm):
        module.bias.data.zero_()
        module.weight.data.fill_(1.0)
    elif isinstance(module, LlamaRMSNorm):
        # The guide leaves the norm of Llama out.
        module.weight.data.fill_(1.0)
    elif isinstance(module, (ParallelEmbedding, RowParallelLinear, ColumnParallelLinear)):
        module.init_weight_cpu()
        bias = getattr(module, "bias", None)
        if bias is not None:
            bias.data.zero_()


class CountedText(Dataset[torch.Tensor]):
    """Sequences ``(LENGTH,)`` of ids that go up by one, from a start that the seed draws."""

    def __init__(self, count: int, seed: int) -> None:
        self._starts = torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> torch.Tensor:
        sequence: torch.Tensor = (self._starts[index] + torch.arange(LENGTH)) % VOCABULARY
        return sequence


def data_loader(args: argparse.Namespace) -> DataLoader[torch.Tensor]:
    """Batches of this data-parallel replica: its tensor-parallel and pipeline ranks get the same ones."""
    text = CountedText(args.steps * args.batch_size, args.seed)
    replicas = parallel_state.get_data_parallel_size()
    sampler: DistributedSampler[Any] = DistributedSampler(
        text, num_replicas=replicas, rank=parallel_state.get_data_parallel_rank()
    )
    return DataLoader(text, sampler=sampler, batch_size=args.batch_size // replicas, num_workers=0, drop_last=True)


def read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Flags of this script, with the names that the guide uses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", type=int, default=1)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--num-microbatches", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences in a step, over all replicas")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace-file-path")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    for step, loss in enumerate(train(read_arguments(sys.argv[1:])), 1):
        print(f"step {step}: loss {loss:.4f}")
