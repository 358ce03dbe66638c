"""Parts of loading a language model on stderr: which one runs, and how long each took."""

from __future__ import annotations

import time
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.status import Status

FILE, PACKING, PASSES, KERNELS, LINKING = "file", "packing", "passes", "kernels", "linking"
CUDA_KERNELS = "CUDA kernels"
_MEANINGS = {
    FILE: "reading the file",
    PACKING: "packing weights",
    PASSES: "lowering the model",
    KERNELS: "compiling kernels",
    CUDA_KERNELS: "compiling CUDA kernels",
    LINKING: "linking",
}
_PACKING_PASSES = {"FormQuantizedMatmuls", "HoistEncodings"}  # passes that lay weights out anew


class LoadingParts:
    """Progress of loading, to be called as `relax_hetero.compile` calls its `progress`.

    On a terminal the spinner's line changes; elsewhere, such as in a log, each part writes a line when it begins.
    `name`: name of the model; `status`: spinner on stderr; `seconds`: seconds of each part so far.
    """

    def __init__(self, name: str, status: Status) -> None:
        self._name, self._status = name, status
        self._begin = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self._shown: set[str] = set()
        self._show(FILE, "")

    @cached_property
    def _passes(self) -> list[str]:
        """The part of each pass; models that are compiled already need none, and no compiler."""
        from ..transform.pipeline import pipeline_steps

        return [PACKING if step.name in _PACKING_PASSES else PASSES for step in pipeline_steps()]

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Note that `done` of `total` passes or kernels are done."""
        if stage == PASSES:
            finished = self._passes[done - 1] if self.seconds and done <= len(self._passes) else FILE
            next_part = self._passes[done] if done < min(total, len(self._passes)) else KERNELS
        else:
            finished, next_part = stage, stage if done < total else LINKING
        self._finish(finished)
        self._show(next_part, f", {done} of {total} {stage}")

    def end(self) -> None:
        """Print how long all parts took."""
        self._finish(LINKING if self.seconds else FILE)
        parts = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in self.seconds.items())
        self._print(f"Loaded {self._name} in {sum(self.seconds.values()):.1f} s: {parts}")

    def _finish(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._begin
        self._begin = now

    def _show(self, part: str, counts: str) -> None:
        text = f"{self._name}: {_MEANINGS[part]}"
        if self._status.console.is_terminal:
            self._status.update(text + counts)
        elif part not in self._shown:
            self._print(text)
        self._shown.add(part)

    def _print(self, text: str) -> None:
        self._status.console.print(text, markup=False, soft_wrap=True)
