"""OpenAI's client with `routeahead serve`: an answer, a stream, and one that keeps to a schema.

routeahead serve model.gguf
python with_openai.py http://127.0.0.1:8080
"""

import json
import sys

from openai import OpenAI

QUESTION = [{"role": "user", "content": "What is 25 + 17?"}]
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"enum": ["below 50", "50 or more"]}},
    "required": ["sum"],
}

client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
model = client.models.list().data[0].id

stream = client.chat.completions.create(
    model=model, messages=QUESTION, temperature=0, max_tokens=32, stream=True
)
print("streamed:", "".join(chunk.choices[0].delta.content or "" for chunk in stream))

done = client.chat.completions.create(
    model=model,
    messages=QUESTION,
    temperature=0,
    max_tokens=32,
    response_format={"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}},
)
print("by schema:", json.loads(done.choices[0].message.content)["sum"])

done = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=32)
print("answer:", done.choices[0].message.content)
