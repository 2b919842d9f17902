"""Builds the emulated device of device.cpp, and makes it known to torch as "apart"."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_name("device.cpp")
COMPILER = os.environ.get("CXX", "c++")
HAS_COMPILER = shutil.which(COMPILER) is not None
NAME = "apart"


def build(directory: Path) -> Path:
    """Compile it into a directory; returns the library."""
    library = directory / "apart.so"
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    flags = ["-O0", "-w", "-std=c++20", "-fPIC", "-shared"]
    linked = [*(f"-L{path}" for path in cpp_extension.library_paths()), "-lc10", "-ltorch_cpu", "-ltorch"]
    subprocess.run([COMPILER, *flags, *includes, str(SOURCE), "-o", str(library), *linked], check=True, timeout=600)
    return library


def install(library: Path | str) -> torch.device:
    """Have torch know the device, for the rest of the process; a Trainer for any device takes it."""
    torch.ops.load_library(str(library))
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _Device())
    nn.Module._apply = _in_place(nn.Module._apply)
    device = torch.device(NAME, 0)
    _prefer(device)
    return device


class _Device:
    """What torch asks of `torch.apart`: one device, with the random numbers of the CPU."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device: Any = None) -> None:
        pass


def _in_place(apply: Any) -> Any:
    """`module.to(device)` that keeps the parameters the objects they are, as it does between a CPU and a GPU."""

    def applied(self: nn.Module, *args: Any) -> nn.Module:
        was = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return apply(self, *args)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(was)

    return applied


def _prefer(device: torch.device) -> None:
    """Have `device="auto"` be this device where it would be the CPU."""
    from trainwright.fit import arguments

    choose = arguments.choose_device

    def chosen(wanted: str | torch.device, model: nn.Module) -> torch.device:
        found = choose(wanted, model)
        return device if wanted == "auto" and found.type == "cpu" else found

    arguments.choose_device = chosen
