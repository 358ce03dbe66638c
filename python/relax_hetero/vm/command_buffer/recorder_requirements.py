"""What the commands of a recording together require of each slot, accumulated as they are recorded."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...artifact.commands import READ_WRITE, WRITE, SlotSpec
from ...artifact.signature import Dim
from .operands import Integer, Number, dim


@dataclass
class Requirement:
    """Of one slot, or of one buffer that the recording keeps."""

    static: int = 0
    dynamic: dict[str, None] = field(default_factory=dict)
    alignment: int = 1
    access: str = ""
    dtypes: set[str] = field(default_factory=set)

    def add(self, end: Integer, alignment: int, access: str, dtype: str) -> None:
        """One more use, of the bytes before `end`; `dtype` is empty where only bytes are asked for."""
        if isinstance(end, Number):
            self.dynamic[end.text] = None
        else:
            self.static = max(self.static, end)
        self.alignment = max(self.alignment, alignment)
        self.access = access if self.access in ("", access) else READ_WRITE
        if dtype:
            self.dtypes.add(dtype)

    @property
    def is_written(self) -> bool:
        """Whether any command writes it."""
        return self.access in (WRITE, READ_WRITE)

    @property
    def nbytes(self) -> Dim:
        """The least size: a number, or text over parameters and sizes."""
        if not self.dynamic:
            return self.static
        ends = [*([self.static] if self.static else []), *self.dynamic]
        return str(ends[0]) if len(ends) == 1 else f"max({', '.join(map(str, ends))})"

    def slot(self, index: int, device: int) -> SlotSpec:
        """As data."""
        dtype = next(iter(self.dtypes)) if len(self.dtypes) == 1 else ""
        return SlotSpec(f"slot {index}", device, self.nbytes, self.alignment, self.access, dtype)


def end_of(offset: Integer, length: Integer) -> Integer:
    """The byte after a range."""
    return length if isinstance(offset, int) and offset == 0 else offset + length


def text_of(value: Integer) -> str:
    """A number in a message."""
    return str(dim(value))
