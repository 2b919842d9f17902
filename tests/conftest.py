"""One thread for every test: two are slower on small machines, and sums stay in one order."""

import torch

torch.set_num_threads(1)
