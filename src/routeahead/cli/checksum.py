"""`routeahead checksum`: hashes of a model's weights, for `--verify-reads`."""

from __future__ import annotations

from routeahead.cli import options, terminal
from routeahead.engine.checksums import write_checksums
from routeahead.experts.layout import MIB
from routeahead.llamacpp.gguf_file import read_layout


def checksum(model: options.Model = None) -> None:
    """Write checksums of a model beside it, so that --verify-reads can compare what is read.

    \b
    routeahead checksum model.gguf
    routeahead run model.gguf --verify-reads -p "Hello"
    """
    options.announce(model)
    layout = read_layout(options.model_path(model))
    with terminal.progress() as say:

        def hashed(done: int, total: int) -> None:
            say(lambda: f"reading: {done // MIB:,} of {total // MIB:,} MiB")

        path = write_checksums(layout, progress=hashed)
    terminal.note(f"checksums written to {path}")
