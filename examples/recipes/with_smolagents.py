"""smolagents with `routeahead serve`: an agent that calls a tool.

    routeahead serve model.gguf -c 4096     # the instructions alone take 1,600 tokens
    python with_smolagents.py http://127.0.0.1:8080

`ToolCallingAgent` demands a call at each step (`tool_choice="required"`), and the server holds such
calls to the tools' schemas. What is called, and when it ends, is up to the model.
"""

import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


model = OpenAIModel(
    "any", api_base=f"{sys.argv[1]}/v1", api_key="none", temperature=0, max_tokens=64
)

agent = ToolCallingAgent(tools=[add], model=model, max_steps=1, verbosity_level=0)
agent.run("What is 25 + 17?")
calls = [
    call.name for step in agent.memory.steps for call in getattr(step, "tool_calls", None) or []
]
print("calls:", calls)

message = {"role": "user", "content": [{"type": "text", "text": "What is 25 + 17?"}]}
print("answer:", model.generate([message]).content)
