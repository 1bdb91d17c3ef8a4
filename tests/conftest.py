"""The variables and threads of all tests.

One thread for the single-process references, as in the ranks: a sum's order can follow the threads.
"""

import os

# OpenMP reads its variable when torch is loaded.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# torch looks up the name of every address that connects; a lost answer then costs 1 s instead of 5.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

import torch

torch.set_num_threads(1)
