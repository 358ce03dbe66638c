"""llama.cpp with the few functions that benchmarks and tests call.

python apps/bench/llm_bench/llama_cpp_model.py MODEL.gguf TOKENS.npy LOGITS.npy [--exact-cache]

It uses the low-level interface of `llama-cpp-python`, whose own class copies logits more often than necessary. As a
program it writes the logits after each token, in a process of its own: where llama.cpp was compiled for AMX, version
0.3.36 crashes (README.md says how to build it without).
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Sequence

import llama_cpp
import numpy as np

FLOAT32_CACHE = 0  # GGML_TYPE_F32; the default is float16


class LlamaCppModel:
    """A model with one sequence.

    Parameters
    ----------
    path : str
        A GGUF file.
    threads : int
    context : int
        Maximum number of positions.
    exact_cache : bool
        Store keys and values in float32, and use plain attention.
    """

    def __init__(self, path: str, threads: int = 1, context: int = 512, exact_cache: bool = False) -> None:
        self._silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._silence, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"llama.cpp does not load {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context, 512, 512
        params.swa_full = False  # layers with a window store only that window
        params.n_threads = params.n_threads_batch = threads
        if exact_cache:
            params.type_k = params.type_v = FLOAT32_CACHE
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it rounds queries to float16
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(self._vocabulary)

    def instructions(self) -> str:
        """The instructions that it was compiled for, as ``AVX2 = 1 | ...``."""
        return llama_cpp.llama_print_system_info().decode()

    def reset(self) -> None:
        """Forget all tokens."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)

    def tokenize(self, text: str) -> list[int]:
        """Tokens of a text, with the beginning-of-text token."""
        data = text.encode()
        room = (llama_cpp.llama_token * (len(data) + 2))()
        count = llama_cpp.llama_tokenize(self._vocabulary, data, len(data), room, len(room), True, False)
        return list(room[:count])

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        room = (llama_cpp.llama_token * len(tokens))(*tokens)
        text = ctypes.create_string_buffer(32 * len(tokens) + 32)
        count = llama_cpp.llama_detokenize(self._vocabulary, room, len(tokens), text, len(text), True, False)
        return text.raw[:count].decode(errors="replace")

    def append(self, tokens: Sequence[int]) -> np.ndarray:
        """Append tokens to the sequence; logits after the last, valid until the next call.

        Parameters
        ----------
        tokens : sequence of int
            At most 512 tokens.

        Returns
        -------
        np.ndarray
            Logits (vocabulary,), float32.
        """
        room = (llama_cpp.llama_token * len(tokens))(*tokens)
        status = llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(room, len(tokens)))
        if status:
            raise SystemExit(f"llama_decode returned {status}")
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context, -1), (self.vocabulary,))

    def all_logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits (tokens, vocabulary) after each of at most 512 tokens from position 0 on, in one batch."""
        self.reset()
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, True
            batch.seq_id[i][0] = 0
        status = llama_cpp.llama_decode(self._context, batch)
        llama_cpp.llama_batch_free(batch)
        if status:
            raise SystemExit(f"llama_decode returned {status}")
        logits = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, (len(tokens), self.vocabulary)).copy()


def main() -> None:
    """Write logits to a file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("model", "tokens", "logits"):
        parser.add_argument(name)
    parser.add_argument("--exact-cache", action="store_true")
    options = parser.parse_args()
    model = LlamaCppModel(options.model, exact_cache=options.exact_cache)
    np.save(options.logits, model.all_logits(np.load(options.tokens).tolist()))


if __name__ == "__main__":
    main()
