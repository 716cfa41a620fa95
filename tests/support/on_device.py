"""A pytest plugin that puts the dense layers of every model of a test run on a device.

    ROUTEAHEAD_TEST_LAYERS=all python -m pytest -p support.on_device tests/model/test_identity.py

References stay on the CPU, unless the device's kernels are not the CPU's (Vulkan): then they have
the same layers there, and no callback. A run ends with a line that counts what was read from the
device, so that whoever starts it can see that something was.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

from routeahead import Llama
from routeahead.llamacpp import tensor_values
from routeahead.llamacpp.eval_callback import EvalCallback
from support import reference
from support.rpc_device import DEVICE, LAYERS, Server, Unavailable, Vulkan

_counted: Counter[str] = Counter()
_devices: list[Server | Vulkan] = []


def counting(owner: Any, name: str, label: str) -> None:
    """Counts the calls of a function from now on."""
    inner = getattr(owner, name)

    def counted(*arguments: Any, **keywords: Any) -> Any:
        _counted[label] += 1
        return inner(*arguments, **keywords)

    setattr(owner, name, counted)


def pytest_configure() -> None:
    vulkan = os.environ.get(DEVICE) == "vulkan"
    try:
        _devices.append(Vulkan() if vulkan else Server())
    except Unavailable as error:
        pytest.exit(f"no device: {error}", returncode=5)
    layers = os.environ.get(LAYERS, "all")
    wanted = layers if layers in ("all", "auto") else int(layers)
    if vulkan:
        reference.LAYERS = 0x7FFFFFFF if layers == "all" else int(layers)
    inner = Llama.__init__

    def on_device(self: Llama, *arguments: Any, **keywords: Any) -> None:
        if not keywords.get("vocab_only"):
            keywords.setdefault("n_gpu_layers", wanted)
        inner(self, *arguments, **keywords)

    Llama.__init__ = on_device  # type: ignore[method-assign]
    counting(tensor_values, "_fetch", "values")
    counting(EvalCallback, "_at_copy", "copies")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    counts = " ".join(f"{label}={_counted[label]}" for label in ("copies", "values"))
    terminalreporter.write_line(f"device: {counts}")


def pytest_unconfigure() -> None:
    for device in _devices:
        device.close()
