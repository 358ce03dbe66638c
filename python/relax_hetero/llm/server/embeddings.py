"""``/v1/embeddings`` over an encoder."""

from __future__ import annotations

import base64
import threading
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from ..encoder import Encoder
from .api_errors import ApiError
from .fields import NEUTRAL_VALUES, refuse_unsupported_fields

_Tokens = Annotated[list[int], Field(min_length=1)]
_MAX_INPUTS = 2048


class EmbeddingBody(BaseModel):
    """Request to ``/v1/embeddings``."""

    model_config = ConfigDict(strict=True, extra="allow")
    input: str | _Tokens | list[str] | list[_Tokens]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None

    @property
    def inputs(self) -> list[str | list[int]]:
        """Texts or tokens. Raises ApiError if there are none, or too many."""
        is_one = isinstance(self.input, str) or (len(self.input) > 0 and isinstance(self.input[0], int))
        inputs: list[Any] = [self.input] if is_one else list(self.input)
        if not 1 <= len(inputs) <= _MAX_INPUTS:
            raise ApiError(400, f"input: found {len(inputs)} texts, expected 1 to {_MAX_INPUTS}", "input")
        return inputs

    def refuse_unsupported(self) -> None:
        """Raise ApiError for unsupported fields that would change the answer."""
        refuse_unsupported_fields(self.model_extra or {}, NEUTRAL_VALUES)


def embed(
    encoder: Encoder,
    body: EmbeddingBody,
    model: str,  # name of the model in the answer
    is_over: threading.Event,  # set when nobody waits for the answer any more
) -> dict[str, Any]:
    """Compute the answer: embeddings of length 1.

    Raises ApiError, RequestError, UnicodeEncodeError if a text is empty, too long or not Unicode, or other `dimensions`
    than the model's are asked for.
    """
    data, count = [], 0
    for index, text in enumerate(body.inputs):
        if is_over.is_set():
            break
        tokens = encoder.tokenizer.encode(text, special=False) if isinstance(text, str) else text
        vector = np.asarray(encoder.embed_tokens(tokens), np.float32)
        if body.dimensions not in (None, vector.size):
            found = f"found {body.dimensions}, expected the model's {vector.size}"
            raise ApiError(400, f"dimensions: {found}", "dimensions")
        vector = vector / max(float(np.linalg.norm(vector)), float(np.finfo(np.float32).tiny))
        is_text = body.encoding_format == "base64"
        embedding = base64.b64encode(vector.astype("<f4").tobytes()).decode() if is_text else vector.tolist()
        data.append({"object": "embedding", "index": index, "embedding": embedding})
        count += len(tokens)
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": model, "usage": usage}
