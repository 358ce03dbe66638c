"""Run attacks on sizes in this process, and print what is wrong: ``python -m fuzz.run_size_attacks 0 12 24``.

A line for each finding, as JSON. A process that ends before it prints ``done`` has crashed in the call printed last.
"""

from __future__ import annotations

import itertools
import json
import re
import resource
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import relax_hetero as rh
from fuzz.reference import RefusedByReference, run_reference
from fuzz.size_attacks import attacks
from fuzz.sizes.attack import Attack, Call

MEMORY = 6 << 30
"""Bytes that a process may take: larger results are refused by both sides."""

Outcome = list[np.ndarray] | str
"""Results, or the text of an error."""

# Sizes that onnxruntime refuses and this library does not, each for a reason (docs/guides/onnx.md).
_MORE_THAN_ONNXRUNTIME = {
    r"Reshape: x\[n,4\] to \[0, -1\]": "the size left follows from the others, also of an empty batch",
    r"Pad: (run-time )?reflect": "reflections of reflections, as numpy has them",
    r"Pad: run-time wrap": "no pads at all",
    r"Global\w+Pool": "no channels give no result",
    r"ConvTranspose: all cut away": "an empty result",
    r"(Layer|RMS)Normalization": "rows of no elements",
    r"Attention: mask": "a mask may have axes of size 1",
    r"(Gather|GatherND|ReverseSequence|LSTM): ": "values are checked elsewhere",
}
# Where both give a result, and onnxruntime's is another.
_OTHER_THAN_ONNXRUNTIME = {
    r"Slice: ": "an end of 2**63 - 1 and a negative step: ONNX holds the end at the last element",
    r"MatMulInteger: ": "a product of no elements is 0, where onnxruntime leaves memory as it was",
    r"ReduceMean: ": "the mean of no elements is not a number",
}


def check(attack: Attack) -> Iterator[dict[str, Any]]:
    """Findings in the calls of an attack."""
    try:
        machine = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(attack.model)))
    except rh.HeteroError:
        return
    for number, call in enumerate(attack.calls):
        _say(attack=attack.name, call=number)
        ours, theirs = _our_outcome(machine, call), _their_outcome(attack, call)
        wrong = _difference(attack.name, ours, theirs)
        if wrong:
            inputs = {name: value.tolist() if value.size < 9 else str(value.shape) for name, value in call.items()}
            yield {"wrong": wrong, "attack": attack.name, "inputs": inputs, "ours": str(ours), "theirs": str(theirs)}


def _difference(name: str, ours: Outcome, theirs: Outcome) -> str | None:
    if isinstance(ours, str):
        return None  # an error of the right kind: other kinds end the run
    if isinstance(theirs, str) and ("bad_alloc" in theirs or "allocate memory" in theirs):
        return None  # only one of the two ran out of memory
    if isinstance(theirs, str):
        return None if _is_in(_MORE_THAN_ONNXRUNTIME, name) else "a result where onnxruntime refuses"
    is_same = all(
        one.shape == other.shape and np.allclose(_floats(one), _floats(other), rtol=1e-3, atol=1e-4, equal_nan=True)
        for one, other in itertools.zip_longest(ours, theirs)
    )
    return None if is_same or _is_in(_OTHER_THAN_ONNXRUNTIME, name) else "another result"


def _is_in(table: dict[str, str], name: str) -> bool:
    return any(re.match(pattern, name) for pattern in table)


def _floats(value: np.ndarray) -> np.ndarray:
    return value.astype("float64")


def _our_outcome(machine: Any, call: Call) -> Outcome:
    try:
        result = machine["main"](**call)
    except rh.HeteroError as error:
        return str(error)
    return [np.asarray(value) for value in ([result] if hasattr(result, "numpy") else result)]


def _their_outcome(attack: Attack, call: Call) -> Outcome:
    try:
        return run_reference(attack.model, call)
    except RefusedByReference as error:
        return str(error)


def _say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def main(arguments: Sequence[str]) -> None:
    """Run the attacks of these indices; all without any."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    chosen = {int(argument) for argument in arguments}
    for index, attack in enumerate(attacks()):
        if index in chosen or not chosen:
            for finding in check(attack):
                _say(**finding)
    _say(done=True)


if __name__ == "__main__":
    main(sys.argv[1:])
