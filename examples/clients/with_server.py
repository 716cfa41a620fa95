"""`python -m llama_cpp.server` with a streamed model: takes the same options.

    python examples/clients/with_server.py --model model.gguf --n_ctx 4096

The server has no options for settings of this class, so they stand here.
"""

from typing import Any

import llama_cpp
from llama_cpp.server.__main__ import main

import routeahead


class Llama(routeahead.Llama):
    """With the settings of this server."""

    def __init__(self, model_path: str, **keywords: Any) -> None:
        super().__init__(model_path, cache_mb="auto", **keywords)


llama_cpp.Llama = Llama
main()
