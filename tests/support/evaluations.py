"""What the tests of `routeahead eval` share, less its fixtures (`eval_fixtures`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_cpp

from routeahead.evaluation.evaluate import Setting

# The fixtures' vocabulary has a token for each byte, except for spaces.
TEXT = "Experts,are,read,from,disk,as,tokens,route,to,them;the,rest,stays.\n" * 2
TOKENS = len(TEXT)
CONTEXT = 64
PLAIN = Setting("plain", {"cache_mb": 0})


class PlainLlama(llama_cpp.Llama):
    """llama-cpp-python without this package, on weights that are laid out as in the file.

    Repacked ones go to AMX kernels where the build has them, and those crash where the system does
    not grant AMX to a process (llama.cpp issue 20824).
    """

    @property
    def model_params(self) -> Any:
        return self._params

    @model_params.setter
    def model_params(self, params: Any) -> None:
        params.use_extra_bufts = False
        self._params = params


def fewer(top_k: int) -> Setting:
    return Setting("fewer", {"cache_mb": 0, "n_expert_used": top_k})


def continuation(path: Path, prompt: str, n: int) -> str:
    """What llama-cpp-python's own generation gives, greedily."""
    llm = PlainLlama(str(path), n_ctx=CONTEXT, n_threads=1, verbose=False)
    text = b""
    for _, token in zip(
        range(n), llm.generate(llm.tokenize(prompt.encode()), temp=0), strict=False
    ):
        text += bytes([token - 3]) if token >= 3 else b""
    llm.close()
    return text.decode(errors="replace").lstrip()
