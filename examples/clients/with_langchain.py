"""LangChain loads the model itself: `llama_cpp.Llama` is replaced, settings are `model_kwargs`."""

import sys

import llama_cpp
from langchain_community.chat_models import ChatLlamaCpp
from langchain_community.llms import LlamaCpp

import routeahead
from routeahead.models import DEFAULT_MODEL

llama_cpp.Llama = routeahead.Llama

path = sys.argv[1] if sys.argv[1:] else str(DEFAULT_MODEL)
options = {"model_path": path, "n_ctx": 256, "n_threads": 1, "temperature": 0, "max_tokens": 8,
           "verbose": False, "model_kwargs": {"cache_mb": 2}}  # fmt: skip
llm = LlamaCpp(**options)
print(llm.invoke("Question: What is 50 - 6?\nAnswer:", stop=["\n"]))
for chunk in llm.stream("Question: What is 50 - 6?\nAnswer:", stop=["\n"]):
    print(chunk, end="|")
print()
print(ChatLlamaCpp(**options).invoke("What is 50 - 6?").content)
