"""LangChain with `routeahead serve`: a structured answer, a stream, a chain.

routeahead serve model.gguf
python with_langchain.py http://127.0.0.1:8080
"""

import sys
from typing import Literal

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Sum(BaseModel):
    """How large the sum of two numbers is."""

    sum: Literal["below 50", "50 or more"]


model = ChatOpenAI(
    base_url=f"{sys.argv[1]}/v1", api_key="none", model="any", temperature=0, max_tokens=32
)

structured = model.with_structured_output(Sum, method="json_schema")
print("by schema:", structured.invoke("What is 25 + 17?").sum)

print("streamed:", "".join(chunk.text for chunk in model.stream("What is 25 + 17?")))

chain = ChatPromptTemplate.from_messages([("user", "What is {sum}?")]) | model | StrOutputParser()
print("answer:", chain.invoke({"sum": "25 + 17"}))
