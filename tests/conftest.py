"""One thread for every test: two are slower on small machines, and sums stay in one order. Ctrl-C is heard."""

import signal

import torch

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as where a shell has started this in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
