"""Units of placement of a language model, and the time that a device takes for one.

A part reads weights and cached keys and values, and multiplies. It takes the longer of both, and the launches of its
kernels. Rows of a mixture of experts choose experts independently of each other: a prompt of many tokens reads nearly
all, a token the few that it chose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...transform.record.form_mailboxes import MAX_BYTES
from ..auto.cost_model import CostModel

KERNELS = {"embd": 1, "inputs": 4, "attn": 5, "ffn": 4, "router": 3, "experts": 2, "output": 2}
"""Approximate number of kernels of a part on a GPU, where launches take the longest."""

_OPERATIONS = 2.0  # operations of a multiply-add


@dataclass(frozen=True)
class Step:
    """Call of a language model.

    Attributes
    ----------
    rows : int
        Consecutive tokens of one sequence: 1, or those of a prefill chunk.
    cached : int
        Tokens of the sequence before them.
    texts : int
        Sequences with so many rows each.
    """

    rows: int
    cached: int
    texts: int = 1


def prefill_steps(tokens: int, chunks: Sequence[int]) -> list[Step]:
    """Calls for a prompt: the longest chunk, and for the rest the shortest that holds it, which is computed whole."""
    steps: list[Step] = []
    longest = max(chunks)
    for begin in range(0, tokens, longest):
        steps.append(Step(min((rows for rows in chunks if rows >= tokens - begin), default=longest), begin))
    return steps


@dataclass(frozen=True)
class Part:
    """Unit of placement: embeddings, the output, or a part of a layer."""

    # "embd"; "inputs": embeddings of each layer; "attn": attention; "ffn": the rest of a layer without experts;
    # "experts": those that tokens choose; "router": the rest of a layer with experts; "output".
    name: str
    layer: int
    resident_bytes: tuple[float, ...]  # bytes of weights and cache on each device
    # Bytes of weights that many rows read on each device, infinite on devices without a kernel.
    weights_read: tuple[float, ...]
    share: float = 1.0  # fraction of them that one row reads
    # Multiply-adds of a row by the type of the weights (`DeviceCost.products`).
    products: Mapping[str, float] = field(default_factory=dict)
    cache_bytes: float = 0.0  # bytes of keys and values of a position
    window: int = 0  # maximum number of positions that a row attends to; 0: all
    scores: float = 0.0  # multiply-adds of a row for each position
    # For the embeddings, True for each device on which the output product reads the same bytes.
    shared: tuple[bool, ...] = ()
    resident_cache: float = 0.0  # bytes of the cache in `resident_bytes`
    variable: str = ""  # variable whose placement rule decides for the part
    experts: tuple[int, ...] = ()  # numbers of the experts, if the part does not have all of the layer
    # Expected number of a row's pairs with each expert of the part, 0 to 1; empty if all are equally frequent.
    pairs: tuple[float, ...] = ()
    # Fractions of the products and of the scores that a prefill computes for one row of each text, as the logits of one
    # are returned (`Hyperparameters.full_layers`).
    last_row: tuple[float, float] = (0.0, 0.0)

    def some_experts(self, experts: Sequence[int], pairs: Sequence[float], variable: str) -> Part:
        """Some experts of a layer; `pairs` has a token's expected pairs with each of all."""
        count, own = len(experts), sum(pairs[expert] for expert in experts)
        return replace(
            self,
            resident_bytes=tuple(size * count / len(pairs) for size in self.resident_bytes),
            weights_read=tuple(size * count / len(pairs) for size in self.weights_read),
            share=own / count,
            products={kind: products * own / sum(pairs) for kind, products in self.products.items()},
            variable=variable,
            experts=tuple(experts),
            pairs=tuple(pairs[expert] for expert in experts),
        )

    def touched(self, rows: int) -> float:
        """Expected fraction of the weights that rows read, which choose experts independently of each other."""
        pairs = self.pairs or (self.share,)
        return 1.0 - sum((1.0 - chance) ** rows for chance in pairs) / len(pairs)

    def rows_read(self, step: Step) -> int:
        """Rows of a text that the part takes."""
        return 1 if self.last_row[0] == 1.0 else step.rows

    def rows_returned(self, step: Step) -> int:
        """Rows of a text that the part returns."""
        return 1 if self.last_row[0] else step.rows

    def read_bytes(self, device: int, step: Step) -> float:
        """Bytes that a step reads on a device."""
        weights = self.weights_read[device] * self.touched(self.rows_read(step) * step.texts)
        return weights + step.texts * self.cache_bytes * self._positions(step)

    def seconds(self, device: int, costs: CostModel, step: Step) -> float:
        """Time of a step on a device."""
        return self.work_seconds(device, costs, step) + KERNELS[self.name] * costs.devices[device].launch

    def work_seconds(self, device: int, costs: CostModel, step: Step) -> float:
        """Time of a step on a device without that of launches."""
        cost = costs.devices[device]
        rows, score_rows = (step.texts * (step.rows * (1.0 - last) + last) for last in self.last_row)
        compute = sum(rows * count / cost.products.get(kind, cost.flops) for kind, count in self.products.items())
        # Attention multiplies 16-bit floats where that is faster, as on GPUs.
        compute += score_rows * self.scores * self._positions(step) / max(cost.flops, cost.products.get("float16", 0.0))
        compute *= _OPERATIONS
        return max(self.read_bytes(device, step) / cost.bandwidth, compute)

    def _positions(self, step: Step) -> float:
        """Mean number of positions that a row attends to."""
        positions = step.cached + (step.rows + 1) / 2
        return min(positions, self.window or positions)


def crossings(parts: Sequence[Part], devices: Sequence[int], host: int) -> Iterator[tuple[int, int, Part]]:
    """Source and destination of each transfer of activations, and the part whose rows cross.

    Rows follow the parts; those of experts come back, because the rest of the layer adds their result.
    """
    previous = host
    for part, device in zip(parts, devices, strict=True):
        if device == previous:
            continue
        yield previous, device, part
        if part.name == "experts":
            yield device, previous, part
        else:
            previous = device


def crossing_seconds(costs: CostModel, source: int, destination: int, size: float) -> float:
    """Time of a transfer of activations; 0 from an implicit host without links."""
    link = costs.links.get((source, destination))
    if link is None or source == destination:
        return 0.0
    latency = link.latency if link.mailbox is None or size > MAX_BYTES else link.mailbox
    return latency + size / link.bandwidth


_MAX_STREAMED_ROWS = 1 << 15
_PINNED_SPEEDUP = 2.0
"""Speed of copies from pinned memory, as experts are, relative to other memory: 42 and 20 GB/s to an H200."""


def _copy_seconds(costs: CostModel, source: int, target: int, size: float) -> float:
    """Time of copies of weights from a CPU's pinned memory."""
    link = costs.links[source, target]
    return link.latency + size / (link.bandwidth * _PINNED_SPEEDUP)


def streamed_seconds(
    part: Part, source: int, target: int, costs: CostModel, row_bytes: float, rows: int
) -> tuple[float, float]:
    """Time of a chunk of `rows` for a CPU's experts: on the CPU, and on a GPU that gets copies of them meanwhile."""
    step, crossing = Step(rows, 0), 2 * crossing_seconds(costs, source, target, row_bytes * rows)
    copy = _copy_seconds(costs, source, target, part.resident_bytes[source])
    return part.seconds(source, costs, step) + crossing, max(copy, part.seconds(target, costs, step))


def first_streamed_rows(part: Part, source: int, target: int, costs: CostModel, row_bytes: float) -> int | None:
    """Shortest chunk for which copies of a CPU's experts are faster; None if they never are."""
    for rows in range(16, _MAX_STREAMED_ROWS, 16):
        on_cpu, copied = streamed_seconds(part, source, target, costs, row_bytes, rows)
        if copied < on_cpu:
            return rows
    return None


def streamed_step_seconds(
    parts: Sequence[Part], devices: Sequence[int], ends: tuple[int, int], costs: CostModel, row_bytes: float, step: Step
) -> float:
    """Time of a step for which a GPU gets copies of all experts of a CPU, the ends of the copies, meanwhile."""
    source, target = ends
    is_copied = [
        part.name == "experts" and device == source and part.rows_read(step) == step.rows
        for part, device in zip(parts, devices, strict=True)
    ]
    at = [target if copied else device for copied, device in zip(is_copied, devices, strict=True)]
    size = sum(part.resident_bytes[source] for part, copied in zip(parts, is_copied, strict=True) if copied)
    return max(step_seconds(parts, at, costs, row_bytes, step), _copy_seconds(costs, source, target, size))


def step_seconds(
    parts: Sequence[Part], devices: Sequence[int], costs: CostModel, row_bytes: float, step: Step
) -> float:
    """Time of a step whose parts run one after the other; `row_bytes` are those of a row of activations."""
    seconds = sum(part.seconds(device, costs, step) for part, device in zip(parts, devices, strict=True))
    return seconds + sum(
        crossing_seconds(costs, source, destination, row_bytes * part.rows_read(step))
        for source, destination, part in crossings(parts, devices, costs.host)
    )


def resident_bytes_of(parts: Sequence[Part], devices: Sequence[int]) -> dict[int, float]:
    """Bytes on each device; a table that embeddings and output share counts once."""
    resident = dict.fromkeys(devices, 0.0)
    for part, device in zip(parts, devices, strict=True):
        if not (part.shared and part.shared[device] and devices[-1] == device):
            resident[device] += part.resident_bytes[device]
    return resident
