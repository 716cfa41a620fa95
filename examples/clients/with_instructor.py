"""instructor: patch the model's `create_chat_completion_openai_v1`.

llama-cpp-python wants a schema in a `json_object`, and instructor 1.17 sends a `json_schema`, which
is ignored: `constrained` is needed with the plain class too.
"""

import sys
from typing import Any, Literal

import instructor
from pydantic import BaseModel

from routeahead import Llama
from routeahead.models import DEFAULT_MODEL


class Answer(BaseModel):
    """What the model may say."""

    difference: Literal["44", "45", "46"]


llm = Llama(sys.argv[1] if sys.argv[1:] else DEFAULT_MODEL, n_ctx=512, n_threads=1, cache_mb=2)


def constrained(response_format: Any = None, **request: Any) -> Any:
    """The completion, with the schema where llama-cpp-python looks for it."""
    schema = response_format["json_schema"]["schema"]
    return llm.create_chat_completion_openai_v1(
        response_format={"type": "json_object", "schema": schema}, **request
    )


create = instructor.patch(create=constrained, mode=instructor.Mode.JSON_SCHEMA)
messages = [{"role": "user", "content": "What is 50 - 6?"}]
print(create(messages=messages, response_model=Answer, temperature=0, max_tokens=64))
