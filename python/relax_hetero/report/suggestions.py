"""Suggestions of changes, from a profile, in sentences: the first screen of a report shows them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..artifact.metadata import Metadata, device_names
from ..vm.profile import MACHINE, TO_DEVICE
from .device_peaks import COMPUTE, MEMORY

# Fractions of a call from which something is worth a sentence: what kernels do, a kernel alone, what is not a kernel.
_KERNELS, _KERNEL, _AROUND = 0.2, 0.1, 0.05
_FASTER = 1.5
"""Ratio of the measured rates of two types from which the faster one is worth a sentence."""
_SLOW = 0.4
"""Fraction of its peak below which a kernel leaves something to gain."""
_NARROW = {"f16": "float16", "bf16": "bfloat16"}


def suggestions(
    metadata: Metadata, rows: Sequence[Mapping[str, Any]], peaks: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Sentences, those about most of a call first.

    Parameters
    ----------
    metadata : Metadata
        Metadata of the executable.
    rows : sequence of mapping
        Rows of a profile as a report holds them; none where nothing was measured.
    peaks : mapping of str to mapping
        Measured peaks of devices, by name (`device_peaks.peaks_of`).
    """
    if not rows:
        return ["Nothing was measured: explain --profile, or profile= of Executable.report, says where the time goes."]
    found = sorted(
        [*_around(metadata, rows), *_kernels(rows, peaks), *_serialized_devices(metadata)], key=lambda one: -one[0]
    )
    return [text for _, text in found] or [
        "Nothing stands out: kernels take the time, near what was measured as peaks."
    ]


def _around(metadata: Metadata, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[float, str]]:
    moved, machine = (sum(row["share"] for row in rows if row["symbol"] == name) for name in (TO_DEVICE, MACHINE))
    if moved >= _AROUND:
        yield (
            moved,
            f"Transfers take {100 * moved:.0f} % of a call: place ops that exchange large values on one device.",
        )
    if machine >= _AROUND:
        text = f"{100 * machine:.0f} % of a call is spent around kernels, on allocation, shapes and bytecode"
        if metadata.single_calls:
            ((why, _),) = Counter(call.why for call in metadata.single_calls).most_common(1)
            text += f": {len(metadata.single_calls)} kernel calls are outside of command buffers, most because {why}"
        yield machine, f"{text}."


def _kernels(rows: Sequence[Mapping[str, Any]], peaks: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[float, str]]:
    shares: defaultdict[tuple[str, str], float] = defaultdict(float)
    slow = []
    for row in rows:
        reached = row["share_of_peak"] or 1
        if row["share"] >= _KERNEL and reached < _SLOW:
            slow.append((row, reached))
        elif row["bound"] == MEMORY or row["precision"] == "f32":
            shares[row["device"], row["bound"]] += row["share"]
    for row, reached in slow[:2]:
        here = f"{row['symbol']} takes {100 * row['share']:.0f} % of a call, and reaches {100 * reached:.0f} %"
        ways = "measure while nothing else runs, then look at its shapes and layouts"
        yield row["share"], f"{here} of the {row['bound']} peak of {row['device']}: {ways}."
    for (device, bound), share in shares.items():
        if share < _KERNELS:
            continue
        rates = peaks[device]["operations_per_second"] if bound == COMPUTE else {}
        ratio, name = max(((rates[name] / rates["f32"], name) for name in _NARROW if name in rates), default=(0, ""))
        if bound == MEMORY:
            ways = "weights of 8 or 4 bits, or values of 16, are fewer bytes"
            yield share, f"The memory of {device} bounds kernels that take {100 * share:.0f} % of a call: {ways}."
        elif ratio >= _FASTER:
            here = f"{100 * share:.0f} % of a call is arithmetic in f32 on {device}, which is {ratio:.1f} times as fast"
            yield share, f'{here} in {name}: rh.transform.ToMixedPrecision("{_NARROW[name]}").'


def _serialized_devices(metadata: Metadata) -> Iterator[tuple[float, str]]:
    names = device_names(metadata.devices)
    for schedule in metadata.schedules:
        working = [step.devices for step in schedule.steps if not step.is_transfer]
        devices = sorted({index for indices in working for index in indices if index >= 0})
        if len(devices) > 1 and not schedule.overlaps():
            who = " and ".join(names[index] for index in devices)
            yield (
                0,
                f"{who} take turns within a call of {schedule.function}: submit() several calls, or use one device.",
            )
