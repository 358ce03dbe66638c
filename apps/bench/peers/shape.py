"""The extents of a product, and the error of a contestant that cannot compute it."""

from __future__ import annotations

import re
from dataclasses import dataclass


class Unsupported(Exception):
    """A contestant cannot compute a product; its row shows the reason."""


@dataclass(frozen=True)
class Shape:
    """Extents of a product: ``batch`` times (m, k) by (k, n); batch 0 means two plain matrices."""

    m: int
    k: int
    n: int
    batch: int = 0

    @staticmethod
    def parse(text: str) -> Shape:
        """``128x768x3072``, ``256`` for a cube, ``12*128x64x128`` for a batch; ValueError for other text."""
        match = re.fullmatch(r"(?:(\d+)\*)?(\d+)(?:x(\d+)x(\d+))?", text)
        if match is None:
            raise ValueError(f"{text!r} is no shape; expected MxKxN, N for a cube, or BATCH*MxKxN")
        batch, m, k, n = (int(size) if size else 0 for size in match.groups())
        return Shape(m, k or m, n or m, batch)

    def __str__(self) -> str:
        return (f"{self.batch}*" if self.batch else "") + f"{self.m}x{self.k}x{self.n}"

    @property
    def operations(self) -> int:
        """Multiplications and additions of one product."""
        return 2 * max(1, self.batch) * self.m * self.k * self.n

    def tensor(self, rows: int, columns: int) -> tuple[int, ...]:
        """Shape of a matrix, or of the batch of them."""
        return (self.batch, rows, columns) if self.batch else (rows, columns)
