"""`rh.llm.Encoder`: embeddings of texts, from encoders such as BERT or from the hidden values of any language model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .errors import RequestError
from .folder_tokenizer import tokenizer_of

if TYPE_CHECKING:
    from ..frontend.onnx.placement_rules import PlacementRules
    from ..target.make_vdevice import VDeviceEntry

LENGTHS = (32, 128, 512, 2048)  # default maximum tokens of texts, as far as the model was trained for them


class Encoder:
    """Embeddings of texts; not thread-safe.

    Parameters
    ----------
    path : str or path
        GGUF file or folder of Hugging Face. Its pooling is that of the file (in a folder, of its module for
        sentence-transformers), else the mean for encoders and the last token for other models.
    vdevices, placement, activation_bits, activations
        As for `rh.from_gguf`; placement by rules.
    lengths : sequence of int, optional
        Maximum tokens of a text, for each compiled function; by default up to 2,048, or up to the model's context.
    progress : callable, optional
        As for `rh.compile`.

    Attributes
    ----------
    tokenizer : Tokenizer or JsonTokenizer
        Tokenizer of the file.
    lengths : tuple of int
        Maximum tokens of a text of each function, ascending.
    vocabulary : int
        Number of tokens of the model.

    Raises
    ------
    HeteroError
        If the file cannot be read, placed or compiled, or a length exceeds the model's context.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        vdevices: VDeviceEntry | Iterable[VDeviceEntry] | None = None,
        placement: PlacementRules | None = None,
        *,
        lengths: Sequence[int] | None = None,
        activation_bits: int = 8,
        activations: str | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        from ..driver.compile import compile as compile_module
        from ..frontend.from_gguf import encoder_from_gguf
        from ..frontend.gguf.hyperparameters import hyperparameters_of
        from ..frontend.language_model_files import read_language_model
        from ..vm import VirtualMachine

        file = read_language_model(path)
        model = hyperparameters_of(file)
        self.tokenizer = tokenizer_of(file)
        if lengths is None:
            lengths = sorted({min(length, model.context) for length in LENGTHS})
        self.lengths, self._pooling = tuple(sorted(set(lengths))), model.pooling
        self.vocabulary = model.vocabulary
        devices = ["llvm"] if vdevices is None else vdevices
        mod = encoder_from_gguf(file, devices, placement, self.lengths, activation_bits, activations)
        self._machine = VirtualMachine(compile_module(mod, progress=progress))

    def embed(self, texts: Sequence[str], *, normalize: bool = True) -> np.ndarray:
        """Embeddings of texts, (texts, embedding_size) of float32.

        Parameters
        ----------
        texts : sequence of str
            Texts, with the prefixes that the model was trained with, such as ``"search_query: "``.
        normalize : bool
            Whether embeddings have length 1, so that their products are cosines.

        Raises
        ------
        RequestError
            If there are no texts, or a text has no tokens, or more than the longest function takes.
        """
        if isinstance(texts, str) or not texts:
            raise RequestError(f"texts are {texts!r}, expected a sequence of texts, at least one")
        embeddings = np.stack([self.embed_tokens(self.tokenizer.encode(text, special=False)) for text in texts])
        norms = np.linalg.norm(embeddings, axis=1, keepdims=True)
        return embeddings / np.maximum(norms, np.finfo("float32").tiny) if normalize else embeddings

    def embed_tokens(self, tokens: Sequence[int]) -> np.ndarray:
        """Embedding of a text of tokens, (embedding_size,) of float32; its length is not 1.

        Parameters
        ----------
        tokens : sequence of int
            Token ids, with those for the begin and the end of a text that the model expects.

        Raises
        ------
        RequestError
            If there are none, or more than the longest function takes, or one is not in the vocabulary.
        """
        count, longest = len(tokens), self.lengths[-1]
        if not 0 < count <= longest:
            raise RequestError(f"a text has {count:,} tokens, expected 1 to {longest:,}; see lengths of rh.llm.Encoder")
        unknown = next((token for token in tokens if not 0 <= token < self.vocabulary), None)
        if unknown is not None:
            raise RequestError(f"a text has the token {unknown}, expected 0 to {self.vocabulary - 1}")
        rows = next(length for length in self.lengths if length >= count)
        arrays = {"tokens": np.zeros(rows, "int32"), "positions": np.full(rows, -1, "int32")}
        arrays["tokens"][:count], arrays["positions"][:count] = tokens, np.arange(count)
        arrays["pooling"] = np.zeros(rows, "float32")
        chosen = {"mean": slice(count), "cls": slice(1), "last": slice(count - 1, count)}[self._pooling]
        arrays["pooling"][chosen] = 1.0 / (chosen.stop - (chosen.start or 0))
        return np.array(self._machine[f"encode_{rows}"](**arrays)[0].numpy())
