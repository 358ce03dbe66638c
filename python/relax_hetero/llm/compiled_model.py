"""A compiled language model with its cache: what an engine decodes with.

The executable has functions ``decode_B`` and ``prefill_C`` for some numbers of rows (`relax_hetero.from_gguf`). A call
takes the next larger one and fills it up with rows that belong to no sequence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, TypeAlias

import numpy as np
from tvm import runtime

from ..artifact.metadata import device_names
from ..artifact.signature import TensorSpec
from ..errors import BindingError
from ..vm import VirtualMachine
from ..vm.device.memory_pools import receive_buffer
from ..vm.device.tensors import copy_into, empty, is_host, part_of
from ..vm.file.executable import Executable
from ..vm.profile import Profile
from .cache import KVCache
from .description import ModelDescription
from .token_cost import ModelInfo, StepTime, TokenCost, times_of, token_cost, with_times


class SentIntegers:
    """Integer inputs of one function: tokens, positions and tables of pages, written anew for each call.

    They are adjacent in one tensor on each device, so that a call with five such inputs makes one copy to a GPU.

    Parameters
    ----------
    inputs : sequence of TensorSpec
        Inputs of int32; their devices are indices in `devices`, -1 the host.
    devices : sequence of tvm.runtime.Device
    alignment : int
        Alignment of each input's memory, in bytes.

    Attributes
    ----------
    arrays : dict of str to array of int32
        Memory of the host for each input, by name: `send` has the tensors show what is written there.
    tensors : list of tvm.runtime.Tensor
        Arguments in the order of `inputs`; the same tensors for the object's life.
    """

    def __init__(self, inputs: Sequence[TensorSpec], devices: Sequence[runtime.Device], alignment: int) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self._copies: list[tuple[runtime.Tensor, runtime.Tensor]] = []
        found: dict[str, runtime.Tensor] = {}
        for index in {spec.device for spec in inputs}:
            device = runtime.device("cpu", 0) if index < 0 else devices[index]
            found |= self._place([spec for spec in inputs if spec.device == index], device, alignment)
        self.tensors = [found[spec.name] for spec in inputs]

    def _place(self, inputs: Sequence[TensorSpec], device: runtime.Device, alignment: int) -> dict[str, runtime.Tensor]:
        shapes = {spec.name: tuple(int(extent) for extent in spec.shape or ()) for spec in inputs}
        step, count, begins = -(-alignment // 4), 0, {}
        for name, shape in shapes.items():
            begins[name] = count
            count += -(-prod(shape) // step) * step
        target = empty((count,), "int32", device)
        source = target if is_host(device) else empty((count,), "int32", runtime.device("cpu", 0))
        if source is not target:
            self._copies.append((source, target))
        host = np.from_dlpack(source)
        for name, shape in shapes.items():
            self.arrays[name] = host[begins[name] : begins[name] + prod(shape)].reshape(shape)
        return {name: part_of(target, shape, "int32", 4 * begins[name]) for name, shape in shapes.items()}

    def send(self) -> None:
        """Have the tensors show what `arrays` hold; work on CPUs that reads the old values must have ended."""
        for source, target in self._copies:
            copy_into(source, target)


_NO_SEQUENCE = -1

_Integers: TypeAlias = "Sequence[int] | np.ndarray"


class CompiledModel:
    """A model that runs; called by one thread at a time.

    Parameters
    ----------
    executable : Executable
        Executable of a module that `from_gguf` made, with the pages donated.
    description : ModelDescription
        Facts that the module does not say of itself.

    Attributes
    ----------
    vocabulary, context, trained_context, slots, chunk : int
        Logits of a token; most positions of a sequence; most sequences decoded at once; most tokens of a prefill call.
    decodes_like_prefill : bool
        Whether both functions write the same bits of a token into the cache.
    cache : KVCache
        Keys and values of all sequences.
    machine : VirtualMachine
        Machine that runs the executable.

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
        self.trained_context = description.trained_context
        self.slots, self.chunk = description.slots, self._chunks[-1]
        self.decodes_like_prefill = description.decodes_like_prefill
        self.cache = KVCache.of(executable, description)
        self._integers: dict[str, SentIntegers] = {}
        self._steps: dict[str, Callable[[], Any]] = {}
        self._logits: dict[str, tuple[runtime.Tensor, np.ndarray]] = {}

    def prefill(self, slot: int, tokens: np.ndarray | Sequence[int], every: bool = False) -> np.ndarray:
        """Append tokens to a sequence.

        Parameters
        ----------
        slot : int
            Slot of the sequence.
        tokens : array of int, (count,)
            At most `chunk`.
        every : bool
            Whether to return the logits of all tokens, which a module with ``all_logits=True`` has.

        Returns
        -------
        array of float32, (vocabulary,) or (count, vocabulary)
            May be overwritten by the next call.

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
        positions = first + np.minimum(np.arange(rows), count - 1)
        logits = self._call(f"prefill_{rows}", tokens, positions, [slot] * count, count - 1)
        if every:
            return logits[:count]
        return logits[0 if len(logits) == 1 else count - 1]

    def decode(self, slots: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        """Append one token to each of several sequences.

        Parameters
        ----------
        slots : sequence of int
            Slots of the sequences, each once.
        tokens : sequence of int
            Token of each sequence.

        Returns
        -------
        array of float32, (len(slots), vocabulary)
            May be overwritten by the next call.

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
        max_batch = self._batches[-1]
        for first in range(0, len(slots), max_batch):
            part = slice(first, min(first + max_batch, len(slots)))
            count = part.stop - part.start
            rows = next(rows for rows in self._batches if rows >= count)
            positions = lengths[part] if count == rows else [*lengths[part], *[0] * (rows - count)]
            logits = self._call(f"decode_{rows}", tokens[part], positions, slots[part], 0)[:count]
            parts.append(logits if count == len(slots) else logits.copy())
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def token_cost(self, cached: int = 512, profile: bool = False, rounds: int = 8) -> TokenCost:
        """Cost of a decode step of the fewest texts, by parts; printing it gives a table.

        Parameters
        ----------
        cached : int
            Tokens of each text that the cache holds; fewer where the context is shorter.
        profile : bool
            Whether to measure times, which takes a free slot of the cache, and `rounds` steps three times. A command
            buffer that is a CUDA graph is measured as a whole, so that its parts have no times of their own.
        rounds : int
            Medians are taken of so many.

        Raises
        ------
        CacheError
            If there is no free slot to measure with, or no pages.

        Examples
        --------
        >>> model, _ = load("model.gguf")  # doctest: +SKIP
        >>> print(model.token_cost(profile=True))  # doctest: +SKIP
        """
        about, described = self.executable.metadata, self.description
        share = described.experts_used / described.experts if described.experts else 1.0
        cached = max(1, min(cached, self.context - 3 * rounds - 1))
        names = device_names(about.devices)
        found = token_cost(
            about.regions,
            about.kernels,
            names,
            about.placement or (),
            about.single_calls,
            cached,
            ModelInfo(described.windows, share, described.vocabulary),
        )
        if found is None:
            raise BindingError(f"found no command buffer of decode_{self._batches[0]}, expected one to look at")
        return self._timed(found, names, rounds) if profile else found

    def profile(self, cached: int = 512, rounds: int = 5) -> tuple[Profile, Profile]:
        """The times of kernels of a decode step of the fewest texts, and of the largest prefill of a new text.

        Parameters
        ----------
        cached : int
            Tokens that the cache holds of the text that is decoded; fewer where the context is shorter.
        rounds : int
            Each is measured so often; what is returned is the one in the middle, by its time.

        Raises
        ------
        CacheError
            If there is no free slot to measure with, or no pages.

        Examples
        --------
        >>> model, _ = load("model.gguf")  # doctest: +SKIP
        >>> decode, prefill = model.profile()  # doctest: +SKIP
        """
        chunk = min(self.chunk, self.context)
        cached = max(1, min(cached, self.context - rounds - 1))
        with self._filled(chunk):
            pass  # threads begin, memory comes
        prefills = []
        for _ in range(rounds):
            with self._filled(0) as slot:
                prefills.append(self._profiled(slot, f"prefill_{self.chunk}", chunk))
        with self._filled(cached) as slot:
            self.decode([slot], [0])
            steps = [self._profiled(slot, f"decode_{self._batches[0]}", 1) for _ in range(rounds)]
        decode, prefill = (sorted(each, key=lambda one: one.microseconds)[rounds // 2] for each in (steps, prefills))
        return decode, prefill

    @contextmanager
    def _filled(self, count: int) -> Iterator[int]:
        """A sequence of so many tokens."""
        tokens = np.arange(count) % self.vocabulary
        slot = self.cache.add()
        try:
            for first in range(0, count, self.chunk):
                self.prefill(slot, tokens[first : first + self.chunk])
            yield slot
        finally:
            self.cache.free(slot)

    def _timed(self, cost: TokenCost, names: Sequence[str], rounds: int) -> TokenCost:
        """With times, of one text."""
        decode = f"decode_{self._batches[0]}"
        with self._filled(cost.cached) as slot:
            self.decode([slot], [0])  # the first call is checked, later ones look like it
            steps, inside = [], []
            for _ in range(rounds):  # in turns, as other work on the machine comes and goes
                begin = time.perf_counter()
                self.decode([slot], [0])
                steps.append(time.perf_counter() - begin)
                with self.machine.clock_buffers() as clock:  # a clock makes what is outside of kernels slower
                    self.decode([slot], [0])
                inside.append(clock.seconds)
            each = [self._profiled(slot, decode, 1) for _ in range(rounds)]
        step = StepTime(float(np.median(steps)), float(np.median(inside)))
        about = self.executable.metadata
        times = [times_of(profile, about.regions, about.kernels, names) for profile in each]
        seconds = {key: float(np.median([found[key] for found in times if key in found])) for key in times[0]}
        return with_times(cost, seconds, step)

    def _profiled(self, slot: int, function: str, count: int) -> Profile:
        """A function under a profile; its rows count as so many tokens of the sequence."""
        rows, first = int(function.rpartition("_")[2]), self.cache.length(slot)
        self.cache.extend(slot, count)
        positions = first + np.minimum(np.arange(rows), count - 1)
        given = self._inputs(function, [0] * count, positions, [slot] * count, count - 1)
        pages = self.cache.take()
        try:
            return self.machine.profile(function, *given, *pages)
        finally:
            self.cache.release(pages)

    def _inputs(
        self, name: str, tokens: _Integers, positions: _Integers, slots: _Integers, last: int
    ) -> list[runtime.Tensor]:
        """The arguments of a function before the pages; rows beyond those of `slots` belong to no sequence."""
        integers = self._integers.get(name)
        if integers is None:
            every = [spec for spec in self.executable.signature(name).inputs if isinstance(spec, TensorSpec)]
            inputs = [spec for spec in every if not spec.name.startswith("pages_")]
            alignment = self.executable.metadata.alignment
            integers = self._integers[name] = SentIntegers(inputs, self.machine.devices, alignment)
        arrays, count = integers.arrays, len(slots)
        arrays["tokens"][:count], arrays["tokens"][count:] = tokens, 0
        arrays["sequences"][:count], arrays["sequences"][count:] = slots, _NO_SEQUENCE
        arrays["positions"][:] = positions
        if "last" in arrays:
            arrays["last"][:] = last
        for table, pages in self.cache.tables.items():
            if table in arrays:
                arrays[table][:] = pages
        integers.send()
        return integers.tensors

    def _call(self, name: str, tokens: _Integers, positions: _Integers, slots: _Integers, last: int) -> np.ndarray:
        """Logits of a function's rows; overwritten by its next call where they come from a GPU."""
        given, pages = self._inputs(name, tokens, positions, slots, last), self.cache.take()
        try:
            if name not in self._steps:
                logits, *written = self.machine[name](*given, *pages)
                if [one.data_ptr() for one in written] == [one.data_ptr() for one in pages]:
                    # Arguments are the same tensors from now on.
                    self._steps[name] = self.machine.prepare(name, [*given, *pages], result_index=0)
                else:
                    self._steps.clear()
                    pages = written
            else:
                logits = self._steps[name]()
        finally:
            self.cache.release(pages)  # a call that failed wrote into them at most behind the sequences' ends
        return self._on_host(name, logits)

    def _on_host(self, name: str, logits: runtime.Tensor) -> np.ndarray:
        """Logits in memory of a CPU: where they are, or in memory that is kept for those of a function."""
        if is_host(logits.device):
            return np.from_dlpack(logits)
        kept = self._logits.get(name)
        if kept is None:
            shape, dtype, host = tuple(map(int, logits.shape)), str(logits.dtype), runtime.device("cpu", 0)
            pinned = receive_buffer(logits, host)
            tensor = empty(shape, dtype, host) if pinned is None else pinned
            kept = self._logits[name] = tensor, np.from_dlpack(tensor)
        copy_into(logits, kept[0])
        return kept[1]


def _rows(names: Sequence[str], prefix: str) -> list[int]:
    return sorted(int(name.removeprefix(prefix)) for name in names if name.startswith(prefix))
