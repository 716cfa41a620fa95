"""What of a model goes to a device, and what it takes there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from routeahead.config import GpuLayers
from routeahead.engine.offload import Offload, buffer_bytes, kv_needs, plan
from routeahead.engine.ubatch import DEFAULT
from routeahead.experts.layout import ModelLayout
from routeahead.llamacpp.devices import Device, devices
from routeahead.llamacpp.native_log import Buffers


@dataclass(frozen=True)
class OnDevice:
    """Bytes of a device's memory, by part.

    Attributes:
        devices: those that are here; their speed can be measured.
        dense: weights.
        kv: the KV cache of the context, of the layers there.
        compute: llama.cpp's other buffers; an estimate, with some headroom, if nothing was loaded.
    """

    offload: Offload
    devices: Sequence[Device]
    dense: int
    kv: int
    compute: int

    @property
    def total(self) -> int:
        return self.dense + self.kv + self.compute


def offload_here(
    layout: ModelLayout, wanted: GpuLayers, context: int
) -> tuple[Offload, list[Device]]:
    """Which layers would go to a device, and which devices there are; none for "auto" if there is
    no device.

    Args:
        context: tokens.

    Raises:
        SettingsError: "auto", and not even the output layer fits.
    """
    found = devices() if wanted else []
    if wanted == "auto" and not found:
        wanted = 0
    free = sum(device.free for device in found)
    return plan(layout, wanted, free=free, context=context, rows=DEFAULT), found


def expected(layout: ModelLayout, offload: Offload, context: int) -> Buffers:
    """What llama.cpp will allocate for the KV cache, here and there, and for computing there."""
    needs = [need * context for need in kv_needs(layout)]
    here, there = sum(needs[: offload.first]), sum(needs[offload.first :])
    compute = buffer_bytes(layout, context, DEFAULT) if offload.layers else 0
    return Buffers({"KV": here}, {"KV": there, "compute": compute})


def on_device(
    layout: ModelLayout, offload: Offload, found: Sequence[Device], buffers: Buffers
) -> OnDevice:
    """What the device has of a model, of which `buffers` was allocated or is expected."""
    there = dict(buffers.device)
    kv = there.pop("KV", 0) + there.pop("RS", 0)
    return OnDevice(offload, found, offload.device_bytes(layout), kv, sum(there.values()))
