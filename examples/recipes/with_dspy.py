"""DSPy with `routeahead serve`: a signature whose answer is held to its fields.

    routeahead serve model.gguf
    python with_dspy.py http://127.0.0.1:8080

`JSONAdapter` asks for a JSON schema, which the server makes a grammar of. So the answer has the
signature's fields whatever the model; the other adapters rely on the model to follow a layout.
It asks for a schema only if the model's name is one that DSPy knows to take one. The server takes
any name.
"""

import os
import sys

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "true")  # else it fetches a list of prices

import dspy


class Add(dspy.Signature):
    """Add two numbers."""

    question: str = dspy.InputField()
    sum: int = dspy.OutputField()


model = dspy.LM(
    "openai/gpt-4o-mini",
    api_base=f"{sys.argv[1]}/v1",
    api_key="none",
    temperature=0,
    max_tokens=64,
    cache=False,
    num_retries=0,
)
dspy.configure(lm=model, adapter=dspy.JSONAdapter())

found = dspy.Predict(Add)(question="What is 25 + 17?")
print("by signature:", type(found.sum).__name__)

print("answer:", model("What is 25 + 17?")[0])
