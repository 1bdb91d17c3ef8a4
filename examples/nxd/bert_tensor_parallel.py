"""The tensor-parallel guide's BERT: its attention divided over the tensor-parallel ranks, without a pipeline.

torchrun --nproc-per-node 4 examples/nxd/bert_tensor_parallel.py --tensor-parallel-size 2
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import BertConfig

from nxdpp import parallel_layers
from nxdpp.parallel_layers import ColumnParallelLinear, RowParallelLinear, clip_grad_norm, parallel_state
from nxdpp.parallel_layers.grads import bucket_allreduce_gradients

VOCABULARY, LENGTH, MASK = 64, 16, 0
IGNORED = -100
MAX_NORM = 1.0


class ParallelSelfAttention(transformers.models.bert.modeling_bert.BertSelfAttention):
    """Attention over this rank's heads; its forward is transformers'."""

    def __init__(self, config: BertConfig, **options: Any) -> None:
        super().__init__(config, **options)  # type: ignore[no-untyped-call]
        sizes = (config.hidden_size, self.all_head_size)
        self.query: Any = ColumnParallelLinear(*sizes, gather_output=False)
        self.key: Any = ColumnParallelLinear(*sizes, gather_output=False)
        self.value: Any = ColumnParallelLinear(*sizes, gather_output=False)
        size = parallel_state.get_tensor_model_parallel_size()
        if self.num_attention_heads % size:
            raise ValueError(f"{self.num_attention_heads} heads do not divide over {size} tensor-parallel ranks")
        self.num_attention_heads = self.num_attention_heads // size
        self.all_head_size = self.all_head_size // size


class ParallelSelfOutput(transformers.models.bert.modeling_bert.BertSelfOutput):
    """Output of the attention, from this rank's heads."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)  # type: ignore[no-untyped-call]
        self.dense: Any = RowParallelLinear(config.hidden_size, config.hidden_size, input_is_parallel=True)


def train(args: argparse.Namespace) -> list[float]:
    """Train on made-up text; return this replica's loss of each step. Collective over all ranks."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=args.tensor_parallel_size)
    device = parallel_state.local_device()
    torch.manual_seed(args.seed)
    model = parallel_bert()
    parallel_layers.move_model_to_device(model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, args.steps)
    losses: list[float] = []
    for inputs, labels in create_pretraining_dataset(args):
        output = model(input_ids=inputs.to(device), labels=labels.to(device))
        output.loss.backward()
        clip_grad_norm(model.parameters(), MAX_NORM)
        optimizer_step(optimizer, groups=parallel_state.get_data_parallel_group(as_list=True))
        optimizer.zero_grad()
        scheduler.step()
        losses.append(output.loss.item())
    parallel_state.destroy_model_parallel()
    return losses


def parallel_bert() -> Any:
    """Build a small BERT, and replace the attention of its layers."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        # Ranks of a tensor group would draw different values for what each of them has.
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    # Any: transformers types its modules as torch's.
    model: Any = transformers.BertForMaskedLM(config)
    for layer in model.bert.encoder.layer:
        layer.attention.self = ParallelSelfAttention(config)
        layer.attention.output = ParallelSelfOutput(config)
    return model


def optimizer_step(optimizer: torch.optim.Optimizer, groups: list[list[int]]) -> None:
    """Average the gradients over this rank's group of ``groups``, and step, as ``xm.optimizer_step`` does.

    The guide clips earlier, so each replica clips by the norm of its own part of the batch.
    """
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    own = next(group for group in groups if torch.distributed.get_rank() in group)
    assert own == torch.distributed.get_process_group_ranks(parallel_state.get_data_parallel_group())
    bucket_allreduce_gradients(gradients)
    optimizer.step()


def create_pretraining_dataset(args: argparse.Namespace) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Batches of this data-parallel replica, which its tensor-parallel ranks share: ids and labels ``(B, T)``."""
    generator = torch.Generator().manual_seed(args.seed)
    starts = torch.randint(4, (args.steps * args.batch_size, 1), generator=generator)
    text = 1 + (starts + torch.arange(LENGTH)) % (VOCABULARY - 1)
    masked = torch.arange(LENGTH) % 4 == 1
    train_data = TensorDataset(text.masked_fill(masked, MASK), text.masked_fill(~masked, IGNORED))
    replicas = parallel_state.get_data_parallel_size()
    sampler: DistributedSampler[Any] = DistributedSampler(
        train_data, num_replicas=replicas, rank=parallel_state.get_data_parallel_rank()
    )
    size = args.batch_size // replicas
    return DataLoader(train_data, sampler=sampler, batch_size=size, num_workers=0, drop_last=True)


def read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Flags of this script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor-parallel-size", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences in a step, over all replicas")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    for step, loss in enumerate(train(read_arguments(sys.argv[1:])), 1):
        print(f"step {step}: loss {loss:.4f}")
