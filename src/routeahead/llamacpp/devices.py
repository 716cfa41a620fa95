"""The devices besides the CPU that llama.cpp would put layers on."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from routeahead.llamacpp import ggml

_GPU, _INTEGRATED = 1, 2  # `enum ggml_backend_dev_type` (ggml-backend.h)


class Device(NamedTuple):
    """One device.

    Attributes:
        name: as llama.cpp calls it, such as "CUDA0".
        free: bytes of its memory that are free; 0 if it does not say.
        total: bytes of its memory.
    """

    name: str
    free: int
    total: int


def devices() -> list[Device]:
    """What llama.cpp would use: all GPUs, or the first integrated one if there are none."""
    base = ggml.library()
    found = [base.ggml_backend_dev_get(index) for index in range(base.ggml_backend_dev_count())]
    kinds = {address: base.ggml_backend_dev_type(address) for address in found}
    gpus = [address for address in found if kinds[address] == _GPU]
    integrated = [address for address in found if kinds[address] == _INTEGRATED]
    return [_device(address) for address in gpus or integrated[:1]]


def _device(address: int) -> Device:
    base = ggml.library()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    base.ggml_backend_dev_memory(address, ctypes.byref(free), ctypes.byref(total))
    return Device(base.ggml_backend_dev_name(address).decode(), free.value, total.value)
