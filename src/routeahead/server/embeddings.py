"""OpenAI's /v1/embeddings, for a model that was loaded with `embedding=True`."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, Field

from routeahead.engine.llama import Llama
from routeahead.errors import SettingsError


class EmbeddingsRequest(BaseModel):
    """Texts to embed. Unknown fields are ignored."""

    input: Annotated[
        list[str],
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
        Field(min_length=1, max_length=2048),
    ]
    encoding_format: Literal["float", "base64"] = "float"


def embed(llm: Llama, request: EmbeddingsRequest, name: str) -> Iterator[dict[str, Any]]:
    """The work of one request: its only event is the response.

    A model without pooling of its own gives the mean over a text's tokens. Vectors have length 1.

    Raises:
        SettingsError: a text is empty or longer than a batch.
    """
    data, total = [], 0
    for index, text in enumerate(request.input):
        vector, count = _vector(llm, text, index)
        total += count
        values: Any = vector.tolist()
        if request.encoding_format == "base64":
            values = base64.b64encode(vector.tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": values})
    usage = {"prompt_tokens": total, "total_tokens": total}
    yield {"object": "list", "model": name, "data": data, "usage": usage}


def _vector(llm: Llama, text: str, index: int) -> tuple[Any, int]:
    try:
        count = len(llm.tokenize(text.encode("utf-8")))
    except UnicodeEncodeError:
        raise SettingsError(f"input.{index}: holds half of a surrogate pair") from None
    if not 0 < count <= llm.n_batch:
        raise SettingsError(f"input.{index}: has {count} tokens: give 1 to {llm.n_batch}")
    found = np.asarray(llm.embed(text), dtype=np.float32)
    if found.ndim == 2:
        found = found.mean(axis=0)
    length = float(np.linalg.norm(found))
    return (found / length if length else found), count
