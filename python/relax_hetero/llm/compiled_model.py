"""A compiled language model with its cache: what an engine decodes with.

The executable has functions ``decode_B`` and ``prefill_C`` for some numbers of rows (`relax_hetero.from_gguf`). A call
takes the next larger one and fills it up with rows that belong to no sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import BindingError
from ..vm import VirtualMachine
from ..vm.file.executable import Executable
from .cache import KVCache
from .description import ModelDescription

_NO_SEQUENCE = -1


class CompiledModel:
    """A model that runs; called by one thread at a time.

    Parameters
    ----------
    executable : Executable
        Of a module that `from_gguf` made, with the pages donated.
    description : ModelDescription
        What the module does not say of itself.

    Attributes
    ----------
    vocabulary, context, slots, chunk : int
        Logits of a token; most positions of a sequence; most sequences decoded at once; most tokens of a prefill call.
    cache : KVCache
    machine : VirtualMachine

    Raises
    ------
    BindingError
        If the executable has no such functions.
    """

    def __init__(self, executable: Executable, description: ModelDescription) -> None:
        names = list(executable.metadata.signatures)
        self._batches = _rows(names, "decode_")
        self._chunks = _rows(names, "prefill_")
        if not self._batches or not self._chunks:
            raise BindingError(f"found functions {names}, expected decode_B and prefill_C as rh.from_gguf makes them")
        self.machine = VirtualMachine(executable)
        self.executable, self.description = executable, description
        self.vocabulary, self.context = description.vocabulary, description.context
        self.slots, self.chunk = description.slots, self._chunks[-1]
        self.cache = KVCache.of(executable, description)

    def prefill(self, slot: int, tokens: np.ndarray | Sequence[int], every: bool = False) -> np.ndarray:
        """Append tokens to a sequence.

        Parameters
        ----------
        slot : int
        tokens : array of int, (count,)
            At most `chunk`.
        every : bool
            Whether to return the logits of all tokens, which a module with ``all_logits=True`` has.

        Returns
        -------
        array of float32, (vocabulary,) or (count, vocabulary)

        Raises
        ------
        BindingError
            If there are no tokens, or too many.
        CacheError
            If pages run out.
        """
        count = len(tokens)
        if not 0 < count <= self.chunk:
            raise BindingError(f"prefill: found {count} tokens, expected 1 to {self.chunk}")
        rows = next(rows for rows in self._chunks if rows >= count)
        first = self.cache.length(slot)
        self.cache.extend(slot, count)
        given = _Rows(rows)
        given.tokens[:count] = tokens
        given.positions[:count] = np.arange(first, first + count)
        given.positions[count:] = first + count - 1
        given.sequences[:count] = slot
        logits = self._call(f"prefill_{rows}", given, count - 1)
        if every:
            return logits[:count]
        return logits[0 if len(logits) == 1 else count - 1]

    def decode(self, slots: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        """Append one token to each of several sequences.

        Returns
        -------
        array of float32, (len(slots), vocabulary)

        Raises
        ------
        CacheError
            If pages run out; then no sequence has got longer.
        """
        lengths = [self.cache.length(slot) for slot in slots]
        for index, slot in enumerate(slots):
            try:
                self.cache.extend(slot, 1)
            except BaseException:
                for done in range(index):
                    self.cache.cut(slots[done], lengths[done])
                raise
        parts = []
        most = self._batches[-1]
        for first in range(0, len(slots), most):
            part = slice(first, min(first + most, len(slots)))
            count = part.stop - part.start
            rows = next(rows for rows in self._batches if rows >= count)
            given = _Rows(rows)
            given.tokens[:count], given.positions[:count] = tokens[part], lengths[part]
            given.sequences[:count] = slots[part]
            parts.append(self._call(f"decode_{rows}", given, 0)[:count])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _call(self, name: str, rows: _Rows, last: int) -> np.ndarray:
        values: dict[str, Any] = {
            "tokens": rows.tokens,
            "positions": rows.positions,
            "sequences": rows.sequences,
            "last": np.array([last], "int32"),
            **self.cache.tables,
        }
        inputs = self.executable.signature(name).input_names
        given = [values[each] for each in inputs if not each.startswith("pages_")]
        logits, *pages = self.machine[name](*given, *self.cache.take())
        self.cache.give_back(pages)
        return np.asarray(logits.numpy())


class _Rows:
    """What a function is told of its rows."""

    def __init__(self, rows: int) -> None:
        self.tokens = np.zeros(rows, "int32")
        self.positions = np.zeros(rows, "int32")
        self.sequences = np.full(rows, _NO_SEQUENCE, "int32")


def _rows(names: Sequence[str], prefix: str) -> list[int]:
    return sorted(int(name.removeprefix(prefix)) for name in names if name.startswith(prefix))
