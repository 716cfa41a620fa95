"""llama-index loads the model itself, so `llama_cpp.Llama` is replaced before the import."""

import sys

import llama_cpp

import routeahead
from routeahead.models import DEFAULT_MODEL

llama_cpp.Llama = routeahead.Llama

from llama_index.llms.llama_cpp import LlamaCPP  # noqa: E402

llm = LlamaCPP(
    model_path=sys.argv[1] if sys.argv[1:] else str(DEFAULT_MODEL),
    context_window=256,
    max_new_tokens=8,
    temperature=0,
    model_kwargs={"n_threads": 1, "cache_mb": 2},
    verbose=False,
)
print(llm.complete("Question: What is 50 - 6?\nAnswer:", formatted=True).text)
