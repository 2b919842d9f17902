"""Turns a value into bytes for another process, and back: tensors come from any device, and lie on the receiver's."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor


def packed(value: Any) -> bytes:
    """Return anything that can be pickled as bytes: of a tensor its own elements only, not the memory it is a view of.

    Whatever `pickle` raises for what it cannot take.
    """
    file = io.BytesIO()
    _Packer(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def unpacked(data: bytes, device: torch.device | None = None) -> Any:
    """Return what was packed by a process of the same run; tensors of an accelerator on `device`, else on the host."""
    return _Unpacker(io.BytesIO(data), device).load()


class _Packer(pickle.Pickler):
    """Takes tensors of accelerators and views to the host, in memory of their own."""

    def persistent_id(self, value: Any) -> tuple[bool, Tensor] | None:
        """Tell whether a tensor comes from an accelerator, and give it as it is sent; None: as it is."""
        if type(value) is not Tensor or value.layout is not torch.strided:
            return None
        if not value.is_cpu:
            return True, value.detach().cpu()
        return (False, value.detach().clone()) if _is_view(value) else None


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, device: torch.device | None) -> None:
        super().__init__(file)
        self._device = device

    def persistent_load(self, sent: tuple[bool, Tensor]) -> Tensor:
        """Return a tensor that was sent, on the accelerator if it comes from one."""
        elsewhere, tensor = sent
        return tensor.to(self._device) if elsewhere and self._device is not None else tensor


def _is_view(tensor: Tensor) -> bool:
    """Whether a tensor's memory holds more than the tensor, or must be laid out anew."""
    return tensor.requires_grad or tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
