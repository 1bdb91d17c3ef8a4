"""Record five steps of a small Llama on 2 ranks: ``torchrun --nproc-per-node 2 tests/schedules/view/record.py``.

The timeline is ``trace.json`` in the working directory.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nxdpp import NxDPPModel, parallel_state

torch.set_num_threads(1)
torch.manual_seed(0)
parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
config = LlamaConfig(
    vocab_size=4096, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8
)
model = NxDPPModel(LlamaForCausalLM(config), num_microbatches=8, trace_file_path="trace.json")
tokens = torch.randint(0, 4096, (8, 128))
for _ in range(5):
    model.run_train(input_ids=tokens, labels=tokens)
