"""What goes to a device, as `inspect` and `doctor` show it."""

from __future__ import annotations

from routeahead.cli.terminal import size
from routeahead.doctor.device import OnDevice


def device_rows(there: OnDevice | None) -> list[tuple[str, str]]:
    """(label, value) rows; none if nothing goes there."""
    if not there:
        return []
    free = sum(device.free for device in there.devices)
    names = ", ".join(device.name for device in there.devices)
    return [
        ("on a device", f"{size(there.total)}, {there.offload.describe()}"),
        ("  free there", f"{size(free)} ({names})" if names else "none here"),
        ("  dense weights", size(there.dense)),
        ("  KV cache", size(there.kv)),
        ("  compute buffers", size(there.compute)),
    ]
