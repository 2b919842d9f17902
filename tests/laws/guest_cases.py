"""What a process and a user's own objects look like, and the plain loop: shared by the Guest law's tests."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import threading
import warnings

import numpy as np
import torch
import torch.nn.modules.module as torch_modules
import torch.optim.optimizer as torch_optimizer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 3


def rows_of_data(rows=30, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def loader(rows=30, *, seed=0, generator=None, **settings):
    return DataLoader(TensorDataset(*rows_of_data(rows, seed)), 8, shuffle=True, generator=generator, **settings)


class Net(nn.Module):
    """Dropout, BatchNorm, and a linear layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.twice = nn.Linear(8, 8)
        self.noise = nn.Dropout(0.3)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.twice(torch.relu(self.norm(self.first(x))))
        return self.last(self.noise(self.twice(torch.relu(hidden))))


def network(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net()


def adamw(model, **settings):
    return torch.optim.AdamW(model.parameters(), lr=0.01, **settings)


def seed_all():
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


def generators():
    """Where every global generator stands."""
    return random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2], torch.get_rng_state()


def plain_loop(model, optimizer, data, *, epochs=EPOCHS, each_epoch=None):
    """The loop that a user would write."""
    seed_all()
    for epoch in range(epochs):
        if each_epoch is not None:
            each_epoch(epoch)
        for x, y in data:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return generators()


def process():
    """Everything of the process that a library could leave changed, as comparable values."""
    handlers = {number: signal.getsignal(number) for number in sorted(signal.valid_signals())}
    loggers = {name: logging.getLogger(name) for name in ("", "trainwright", "torch", "py.warnings")}
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": str(torch.get_default_device()),
        "threads of torch": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "autocast of cuda": (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "autocast depth": (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
        "matmul": torch.get_float32_matmul_precision(),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "precision of backends": [
            getattr(backend, "fp32_precision", None)
            for backend in (
                torch.backends,
                torch.backends.cuda.matmul,
                torch.backends.cudnn,
                torch.backends.mkldnn,
                getattr(torch.backends.mkldnn, "matmul", None),
            )
        ],
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "gc": (gc.isenabled(), gc.get_threshold(), gc.get_debug(), gc.get_freeze_count()),
        "signals": handlers,
        "warnings": list(warnings.filters),
        "showwarning": warnings.showwarning,
        "hooks of Python": (
            sys.excepthook,
            threading.excepthook,
            sys.unraisablehook,
            sys.getprofile(),
            sys.displayhook,
        ),
        "streams": (sys.stdout, sys.stderr, sys.stdin),
        "logging": {name: (list(one.handlers), one.level, one.propagate) for name, one in loggers.items()},
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "path": list(sys.path),
        "threads": set(threading.enumerate()),
        "recursion": sys.getrecursionlimit(),
        "module hooks": {name: dict(one) for name, one in _hooks(vars(torch_modules), "_global_").items()},
        "optimizer hooks": {name: dict(one) for name, one in _hooks(vars(torch_optimizer), "_global_").items()},
        "what torch has": (nn.Module.__call__, nn.Module.train, torch.Tensor.backward, torch.optim.Optimizer.step),
    }


def _hooks(names, prefix):
    return {name: value for name, value in names.items() if name.startswith(prefix) and isinstance(value, dict)}


def things(model, optimizer, *others):
    """A user's own objects: which they are, what they carry, how they are set; not the numbers in them."""
    groups = optimizer.param_groups
    seen = {
        "optimizer": (type(optimizer), sorted(vars(optimizer)), _hooks(vars(optimizer), "_optimizer_").copy()),
        "hooks of the optimizer": [dict(one) for one in _hooks(vars(optimizer), "_optimizer_").values()],
        "groups": [id(optimizer.param_groups), *map(id, groups)],
        "members of groups": [(sorted(group), [id(p) for p in group["params"]]) for group in groups],
        "settings of groups": [
            {key: value for key, value in group.items() if key not in ("params", "lr", "betas", "k", "train")}
            for group in groups
        ],
    }
    for index, root in enumerate(one for one in (model, *others) if isinstance(one, nn.Module)):
        seen[f"modules {index}"] = [(name, id(one), type(one)) for name, one in root.named_modules()]
        seen[f"modes {index}"] = [(name, one.training) for name, one in root.named_modules()]
        seen[f"attributes {index}"] = [sorted(vars(one)) for one in root.modules()]
        seen[f"hooks {index}"] = [
            {name: dict(value) for name, value in vars(one).items() if "hook" in name and isinstance(value, dict)}
            for one in root.modules()
        ]
        seen[f"parameters {index}"] = [
            (name, id(p), p.requires_grad, p.dtype, p._backward_hooks) for name, p in root.named_parameters()
        ]
        seen[f"buffers {index}"] = [(name, id(b)) for name, b in root.named_buffers()]
    for index, one in enumerate(one for one in others if not isinstance(one, nn.Module)):
        seen[f"data {index}"] = {name: id(value) for name, value in vars(one).items()}
        if isinstance(one, DataLoader):
            seen[f"rows {index}"] = {name: id(value) for name, value in vars(one.dataset).items()}
            seen[f"sampler {index}"] = {name: id(value) for name, value in vars(one.sampler).items()}
    return seen


def assert_same(before, after):
    """Two such descriptions are the same; says which part is not."""
    assert list(before) == list(after)
    for name in before:  # threads may end at any time, and none may come
        assert before[name] == after[name] or (name == "threads" and after[name] <= before[name]), name


def equal(one, other):
    """Two trees of tensors and plain data are equal bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(equal(*pair) for pair in zip(one, other, strict=True))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
