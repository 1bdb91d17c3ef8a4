"""Program of 3 ranks in which rank 2 makes a mistake after a call, and the others wait: ``mistaken_program.py FOLDER``.

Each rank's file for torchrun is in the folder, under the number of the rank.
"""

import os
import sys

import torch

from nxdpp import parallel_state
from nxdpp.ranks.exchange import Exchange
from nxdpp.ranks.faults.board import board

rank = int(os.environ["RANK"])
os.environ["TORCHELASTIC_ERROR_FILE"] = os.path.join(sys.argv[1], f"{rank}.json")
parallel_state.initialize_model_parallel()
with board.call("run_train", "step"):
    Exchange().gather(rank)
if rank == 2:
    torch.zeros(()).backward()
Exchange().gather(rank)
