"""Anthropic's client with `routeahead serve`: a call of a tool, a stream, an answer.

routeahead serve model.gguf
python with_anthropic.py http://127.0.0.1:8080
"""

import sys

from anthropic import Anthropic

QUESTION = [{"role": "user", "content": "What is 25 + 17?"}]
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
ADD = {
    "name": "add",
    "description": "Adds two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": NUMBER, "b": NUMBER},
        "required": ["a", "b"],
    },
}
# This server's own `temperature`, `top_k` and others may be given as well.
ASKED = {"model": "any", "messages": QUESTION, "max_tokens": 64, "extra_body": {"temperature": 0}}

client = Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)

done = client.messages.create(**ASKED, tools=[ADD], tool_choice={"type": "tool", "name": "add"})
called = next(part for part in done.content if part.type == "tool_use")
print("calls:", called.name, sorted(called.input))

with client.messages.stream(**ASKED) as stream:
    print("streamed:", "".join(stream.text_stream))

print("answer:", client.messages.create(**ASKED).content[0].text)
