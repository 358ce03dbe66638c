"""What kernels of products send to GPUs, by the interpreter of GPU kernels."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_interpreter.calls import EXTERNS
from relax_hetero.artifact.peer_layout import data_offset
from relax_hetero.encoding.problem import SentSum

SENT = SentSum(1, 3, 2, 1 << 20)
"""A sum of three GPUs, from the second one."""
ADDRESSES = np.array([10 << 40, 20 << 40, 30 << 40])
"""Addresses of the GPUs' memory."""


class SentWords:
    """Numbers that kernels send while this exists; each may be sent once.

    Parameters
    ----------
    shape : tuple of int
        Shape of the result that is sent.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]) -> None:
        self._places, self._shape = {}, shape
        monkeypatch.setitem(EXTERNS, "rh_send_words", self._send)

    @property
    def results(self) -> list[np.ndarray]:
        """The result that each other GPU was sent, in the slot of the sum."""
        data = data_offset(SENT.slot, SENT.ranks, SENT.slot_bytes) + SENT.rank * SENT.slot_bytes
        assert sorted(self._places) == (np.delete(ADDRESSES, SENT.rank) + data).tolist()
        return [row.reshape(self._shape) for row in self._places.values()]

    def _send(self, expressions, call):
        numbers = [expressions.compiled(argument) for argument in call.args[1:-1]]

        def evaluate(lanes, mask):
            values = [np.broadcast_to(each(lanes, mask), lanes.count)[mask].tolist() for each in numbers]
            for place, start, *words in zip(*values, strict=True):
                row = self._places.setdefault(place, np.full(np.prod(self._shape), np.nan, "float32"))
                assert np.isnan(row[4 * start : 4 * start + 4]).all()
                row[4 * start : 4 * start + 4] = words

        return evaluate
