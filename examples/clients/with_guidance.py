"""guidance: give `models.LlamaCpp` a loaded model."""

import sys

from guidance import models, select

from routeahead import Llama
from routeahead.models import DEFAULT_MODEL

llm = Llama(sys.argv[1] if sys.argv[1:] else DEFAULT_MODEL, n_ctx=256, n_threads=1, cache_mb=2)
lm = models.LlamaCpp(llm, echo=False)
lm += "Question: What is 50 - 6?\nAnswer: " + select(["44", "45", "46"], name="answer")
print(lm["answer"])
