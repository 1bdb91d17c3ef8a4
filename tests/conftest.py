"""One thread for the single-process references, as in the ranks: a sum's order can follow the threads."""

import os

# OpenMP reads its variable when torch is loaded.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

torch.set_num_threads(1)
