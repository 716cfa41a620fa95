"""What tells a model from every other, at the price of reading its routers."""

from __future__ import annotations

import hashlib

from routeahead.errors import ModelError
from routeahead.experts.layout import ModelLayout
from routeahead.experts.packed import FINGERPRINT


def fingerprint(layout: ModelLayout) -> str:
    """SHA-256 of the names, types and places of all tensors, and of the routers' and norms' bytes.

    Another quantisation of the same model, or another training of the same architecture, has
    another one; the experts themselves, which may be hundreds of GB, are not read. A packed file
    has that of the file that it was made from.

    Raises:
        ModelError: the file cannot be read.
    """
    known = layout.metadata.get(FINGERPRINT)
    if isinstance(known, str):
        return known
    digest = hashlib.sha256()
    for tensor in sorted(layout.tensors, key=lambda tensor: (tensor.shard, tensor.offset)):
        digest.update(f"{tensor.name} {tensor.quant} {tensor.shape} {tensor.offset}\n".encode())
        if len(tensor.shape) > 1 and ".ffn_gate_inp." not in tensor.name:
            continue
        path = layout.shards[tensor.shard].path
        try:
            with path.open("rb") as file:
                file.seek(tensor.offset)
                digest.update(file.read(tensor.nbytes))
        except OSError as error:
            raise ModelError(f"{path}: cannot read it: {error.strerror}") from None
    return digest.hexdigest()
