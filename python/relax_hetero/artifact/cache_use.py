"""The part of the compile cache in an executable: found there, compiled and stored, or not used."""

from __future__ import annotations

from dataclasses import dataclass

HIT, MISS, UNUSED = "hit", "miss", "unused"


@dataclass(frozen=True)
class CacheUse:
    """Whether an executable came from the compile cache.

    Attributes
    ----------
    state: ``"hit"``: it was found there; ``"miss"``: it was compiled, and can be found from now on unless `why` says
        otherwise; ``"unused"``: nobody looked, for the reason `why`.
    key: Of the module, its devices, the options and the versions; empty where nobody looked.
    seconds: What compiling took, on a hit the one that it stands for.
    why: Why it was not looked for, or not stored.
    """

    state: str = UNUSED
    key: str = ""
    seconds: float = 0.0
    why: str = ""

    def __str__(self) -> str:
        parts = [self.state, self.key[:12], f"compiled in {self.seconds:.2f} s" if self.seconds else "", self.why]
        return ", ".join(part for part in parts if part)
