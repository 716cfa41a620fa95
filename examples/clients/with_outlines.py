"""outlines: give `from_llamacpp` a loaded model."""

import sys
from typing import Literal

import outlines

from routeahead import Llama
from routeahead.models import DEFAULT_MODEL

llm = Llama(sys.argv[1] if sys.argv[1:] else DEFAULT_MODEL, n_ctx=256, n_threads=1, cache_mb=2)
model = outlines.from_llamacpp(llm, chat_mode=False)
print(model("Question: What is 50 - 6?\nAnswer: ", Literal["44", "45", "46"], temperature=0))
