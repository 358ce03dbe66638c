"""A compiled language model with its cache, as an engine uses it.

The executable has functions ``decode_B`` for several batch sizes and ``prefill_C`` for several chunk lengths
(`relax_hetero.from_gguf`), and perhaps ``verify_R``. A call uses the smallest one with enough rows; padding rows do not
belong to any sequence.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from tvm import runtime

from ..artifact.collectives import ASKED_FOR
from ..artifact.metadata import device_names
from ..artifact.signature import TensorSpec, ValueSpec
from ..encoding.pages import EXPERT_COUNTS, TABLES
from ..encoding.token_masks import MASKED_TOKENS
from ..errors import BindingError, CacheError, HeteroError
from ..target.backend import backend_of_device
from ..vm import VirtualMachine
from ..vm.device.cuda_copies import copy_after, end_of_work
from ..vm.device.cuda_streams import Event
from ..vm.device.host_copies import CopiesToHost, EarlyCopies, JoinedColumns
from ..vm.device.nccl import load_nccl
from ..vm.device.nccl_memory import TIMEOUT_SECONDS
from ..vm.device.tensors import copy_into, empty, is_host, on_host, part_of, same_device
from ..vm.file.executable import Executable
from ..vm.profile import Profile
from .background import BackgroundTask
from .cache import KVCache
from .description import ModelDescription
from .expert_counts import ExpertCounts
from .model import Model
from .token_cost import ModelInfo, StepTime, TokenCost, times_of, token_cost, with_times

_log = logging.getLogger("relax_hetero")


class IntegerInputs:
    """Integer inputs of one function: tokens, positions and page tables, written before each call.

    All inputs of a device are views of one tensor, page tables last, so that most calls make one small copy to a GPU.
    GPUs have two such tensors: calls take turns, and the copy for a call runs alongside the call before.
    """

    def __init__(
        self,
        # Inputs of int32; their `device` is an index in `devices`, or -1 for the host. ``tokens@1`` is a copy of
        # ``tokens`` for another device of a mesh.
        inputs: Sequence[TensorSpec],
        devices: Sequence[runtime.Device],  # physical device of each vdevice
        alignment: int,  # alignment of each input's memory, in bytes
    ) -> None:
        # Host memory of each input, by name, zeros at first; after writing it, call `send`.
        self.arrays: dict[str, np.ndarray] = {}
        self.turn = 0  # 0 or 1 after `send`: index of the tensors of the next call
        self._sources: dict[tuple[str, ...], runtime.Tensor] = {}  # host memory by the names in it
        self._on_host: dict[int, runtime.Tensor] = {}  # inputs of CPUs, which all turns share
        used = {
            index: runtime.device("cpu", 0) if index < 0 else devices[index]
            for index in sorted({spec.device for spec in inputs})
        }
        count = 2 if any(backend_of_device(device).pins_memory for device in used.values()) else 1
        self._turns = [_DeviceInputs() for _ in range(count)]
        self._early_copies = {index: EarlyCopies(device) for index, device in used.items()}
        for turn in self._turns:
            tensors: dict[str, runtime.Tensor] = {}
            for index, device in used.items():
                tensors |= self._allocate([spec for spec in inputs if spec.device == index], device, alignment, turn)
            turn.tensors = [tensors[spec.name] for spec in inputs]
            turn.tokens = [tensors[spec.name] for spec in inputs if _plain_name(spec.name) == "tokens"]

    @property
    def tensors(self) -> list[runtime.Tensor]:
        """Arguments of the next call, in the order of `inputs`; the same tensors in every second call."""
        return self._turns[self.turn].tensors

    def _allocate(
        self, inputs: Sequence[TensorSpec], device: runtime.Device, alignment: int, turn: _DeviceInputs
    ) -> dict[str, runtime.Tensor]:
        in_order = sorted(inputs, key=lambda spec: _plain_name(spec.name) in TABLES.values())
        shapes = {_plain_name(spec.name): tuple(int(extent) for extent in spec.shape or ()) for spec in in_order}
        alignment_elements, count, offsets = -(-alignment // 4), 0, {}
        for name, shape in shapes.items():
            offsets[name] = count
            count += -(-prod(shape) // alignment_elements) * alignment_elements
        index, source = inputs[0].device, self._sources.get(tuple(shapes))
        assert source is not None or not shapes.keys() & self.arrays.keys(), "devices share all inputs or none"
        target = self._on_host.get(index)
        if target is None:
            target = empty((count,), "int32", device)
        if is_host(device):
            self._on_host[index] = target
        if source is None:
            source = target if is_host(device) else empty((count,), "int32", runtime.device("cpu", 0))
            self._sources[tuple(shapes)] = source
            host_array = np.from_dlpack(source)
            host_array[:] = 0
            for name, shape in shapes.items():
                self.arrays[name] = host_array[offsets[name] : offsets[name] + prod(shape)].reshape(shape)
        if source is not target:
            tables = min((offsets[name] for name in TABLES.values() if name in offsets), default=count)
            for copies, end in ((turn.copies, tables), (turn.copies_with_tables, count)):
                parts = [part_of(tensor, (end,), "int32", 0) for tensor in (source, target)]
                copies[index] = self._early_copies[index].prepare(*parts)
        names = [(spec.name, _plain_name(spec.name)) for spec in inputs]
        return {name: part_of(target, shapes[plain], "int32", 4 * offsets[plain]) for name, plain in names}

    def write_rows(self, slots: _Integers, positions: _Integers) -> None:
        """Write the positions and sequences of rows; further rows are padding."""
        arrays, count = self.arrays, len(slots)
        arrays["sequences"][:count], arrays["sequences"][count:] = slots, _NO_SEQUENCE
        arrays["tokens"][count:] = 0
        arrays["positions"][: len(positions)], arrays["positions"][len(positions) :] = positions, 0

    def send(self, tables: Mapping[str, np.ndarray], version: int) -> None:
        """Copy `arrays`, and page tables unless those of the turn are the same, to GPUs; CPUs share their memory.

        Copies are complete before work that is launched later, and `arrays` may be written again at once. `tables`:
        page tables, by name; `version`: `KVCache.tables_version` of `tables`.
        """
        self.turn = (self.turn + 1) % len(self._turns)
        turn = self._turns[self.turn]
        if is_new := turn.tables_version != version:
            for name in tables.keys() & self.arrays.keys():
                columns = tables[name].shape[1]  # others belong to positions after the context
                self.arrays[name][:, :columns] = tables[name]
            turn.tables_version = version
        for index, copies in (turn.copies_with_tables if is_new else turn.copies).items():
            self._early_copies[index].send(copies)

    def copy_tokens(self, copies: Sequence[runtime.Tensor], count: int, end: Event | None = None) -> None:
        """Copy the first `count` tokens from devices that have them, in order with the targets' work, after `send`.

        Each device takes its own copy of the tokens, if it has one, else the first. From another GPU it takes that
        after `end`, the end of the call that computes it. All calls have copies of the same devices, those of the
        model's decode functions.
        """
        turn = self._turns[self.turn]
        if turn.token_copies is None:
            turn.token_copies = [_token_copy(copies, target) for target in turn.tokens]
        for target, (number, copy) in zip(turn.tokens, turn.token_copies, strict=True):
            source = copies[number]
            if copy is not None:
                copy(source.data_ptr(), 4 * count)
                continue
            if count < len(self.arrays["tokens"]):
                source, target = (part_of(tensor, (count,), "int32", 0) for tensor in (source, target))
            if end is None or is_host(target.device):
                copy_into(source, target, wait=False)
            else:
                copy_after(source, target, end)


class _DeviceInputs:
    """Tensors of `IntegerInputs` for every second call, and the copies to each device that has memory of its own."""

    def __init__(self) -> None:
        self.tensors: list[runtime.Tensor] = []
        self.tokens: list[runtime.Tensor] = []
        self.token_copies: list[tuple[int, Callable[[int, int], None] | None]] | None = None
        self.copies: dict[int, list[Callable[[], None]]] = {}
        self.copies_with_tables: dict[int, list[Callable[[], None]]] = {}
        self.tables_version = -1


def _plain_name(name: str) -> str:
    """Name of an input without the number of the device that has a copy."""
    return name.partition("@")[0]


def _devices_of(specs: Sequence[ValueSpec], name: str) -> set[int]:
    """Devices that have a copy, or a part, of an input or result."""
    return {spec.device for spec in specs if isinstance(spec, TensorSpec) and _plain_name(spec.name) == name}


def _token_copy(
    copies: Sequence[runtime.Tensor], target: runtime.Tensor
) -> tuple[int, Callable[[int, int], None] | None]:
    """Index of the tokens that a device takes, and the function that copies them, if they are on the device."""
    for number, copy in enumerate(copies):
        if same_device(copy.device, target.device):
            return number, backend_of_device(target.device).copies_within(target)
    return 0, None


class DecodeCall(NamedTuple):
    """A call of a decode function."""

    function: str
    sequences: int  # number of sequences; further rows are padding
    logits: Sequence[runtime.Tensor]  # (rows, vocabulary); those of each device of a mesh, in order
    tokens: Sequence[runtime.Tensor]  # greedy ones, (rows,); each device of a mesh of GPUs has a copy
    end: Event | None  # end of the call on the GPU of the first tokens, if another GPU reads them in the next step


class CompiledDecodeStep:
    """A decode step that may still run, with its greedy tokens on the way to the host; a `DecodeStep`."""

    def __init__(
        self,
        calls: Sequence[DecodeCall],  # calls of the step, for consecutive sequences
        # Copies to the host of the greedy tokens of each call, as `CopiesToHost.begin` returns them.
        copies: Sequence[Callable[[], np.ndarray]],
        mask: Callable[..., runtime.Tensor] | None = None,  # function ``masked_tokens`` of the model
        mask_parts: int = 1,  # number of parts in which it takes the masks
    ) -> None:
        self.calls, self._copies, self._mask, self._mask_parts = calls, copies, mask, mask_parts

    def tokens(self) -> list[int]:
        """Wait for the end, and return the index of the largest logit of each sequence.

        Raises HeteroError if the step failed, or the largest logit of a sequence is infinite, or one is NaN.
        """
        return self._checked([wait() for wait in self._copies])

    def masked_tokens(self, masks: np.ndarray) -> list[int]:
        """Wait for the end, and return the index of each sequence's largest logit among allowed tokens.

        `masks`: ``(sequences, words)`` int32 (`encoding.token_masks`). Raises HeteroError as `tokens` does.
        """
        assert self._mask is not None, "see CompiledModel.masks_tokens"
        arrays, begin = [], 0
        for call in self.calls:
            rows = np.full((int(call.logits[0].shape[0]), masks.shape[1]), -1, np.int32)
            rows[: call.sequences] = masks[begin : begin + call.sequences]
            parts = map(np.ascontiguousarray, np.split(rows, self._mask_parts, axis=1))
            arrays.append(np.from_dlpack(on_host(self._mask(*call.logits, *parts))))
            begin += call.sequences
        return self._checked(arrays)

    def _checked(self, arrays: Sequence[np.ndarray]) -> list[int]:
        """Tokens of the sequences of all calls."""
        tokens = [
            token for call, array in zip(self.calls, arrays, strict=True) for token in array[: call.sequences].tolist()
        ]
        if min(tokens) < 0:
            raise HeteroError(f"logits of sequence {tokens.index(-1)} of {len(tokens)}: expected finite numbers")
        return tokens


_NO_SEQUENCE = -1

_Integers: TypeAlias = "Sequence[int] | np.ndarray"

_Tokens: TypeAlias = "_Integers | DecodeCall"
"""Tokens of a call: numbers, or the call of the step before for its greedy tokens."""


class CompiledModel(Model):
    """A compiled language model with its KV cache; not thread-safe.

    Parameters
    ----------
    executable : Executable
        Executable of a module of `from_gguf`, with donated pages (so that calls write them in place).
    description : ModelDescription
        Facts that are not in the executable.
    rest : BackgroundTask, optional
        Task that compiles the same functions and more; calls after its end use these.
    all_rows : (int, int), optional
        Rows of the largest decode and prefill functions after its end; by default those of `executable`.
    threads, cores, spin, collective_timeout
        As for `rh.vm.VirtualMachine`.

    Attributes
    ----------
    vocabulary, slots, context, trained_context, chunk, decodes_like_prefill, looks_ahead, masks_tokens
        See `Model`; `chunk` is that of the functions compiled so far, and it looks ahead if a GPU computes logits.
    cache : KVCache
        Keys and values of all sequences.
    draft : CompiledModel or None
        Draft model, if `load` was given one.
    machine : VirtualMachine
        Machine that runs the executable.
    expert_counts : ExpertCounts
        Counters of the experts' tokens, if the module was made with ``count_experts=True``.

    Raises
    ------
    BindingError
        If the executable lacks functions ``decode_B`` or ``prefill_C``.
    """

    cache: KVCache
    draft: CompiledModel | None = None
    has_decode_steps = True

    def __init__(
        self,
        executable: Executable,
        description: ModelDescription,
        rest: BackgroundTask[Executable] | None = None,
        all_rows: tuple[int, int] | None = None,
        *,
        threads: int | None = None,
        cores: Sequence[int] | None = None,
        spin: bool = True,
        collective_timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        self._machine_options: dict[str, Any] = {
            "threads": threads, "cores": cores, "spin": spin, "collective_timeout": collective_timeout
        }  # fmt: skip
        _check_sums(executable)
        self._use(executable)
        self._rest = rest
        if rest is not None:
            weakref.finalize(self, rest.cancel)
        self.description = description
        self.vocabulary, self.context = description.vocabulary, description.context
        self.trained_context, self.slots = description.trained_context, description.slots
        self.decodes_like_prefill = description.decodes_like_prefill
        logits = executable.signature(f"decode_{self._batches[0]}").outputs[0]
        self.looks_ahead = (
            isinstance(logits, TensorSpec) and logits.device >= 0 and not is_host(self.machine.devices[logits.device])
        )
        prefill_inputs = executable.signature(f"prefill_{self._chunks[0]}").inputs
        self._has_all_logits = all(spec.name != "last" for spec in prefill_inputs)
        self._max_batch, max_chunk = all_rows or (self._batches[-1], self.chunk)
        self.cache = KVCache.from_executable(executable, description, chunk=max_chunk)
        inputs = executable.signature(f"decode_{self._batches[0]}").inputs
        self.expert_counts = ExpertCounts(inputs, self.machine.devices)

    def _use(self, executable: Executable) -> None:
        """Call the functions of an executable from now on, with the same cache."""
        names = list(executable.metadata.signatures)
        self._batches = _row_counts(names, "decode_")
        self._chunks = _row_counts(names, "prefill_")
        self._verify_rows = max(_row_counts(names, "verify_"), default=0)
        if not self._batches or not self._chunks:
            raise BindingError(f"found functions {names}, expected decode_B and prefill_C as rh.from_gguf makes them")
        self._integers: dict[str, IntegerInputs] = {}
        self._prepared_calls: dict[tuple[str, int], Callable[[], Any]] = {}
        self._logits: dict[str, JoinedColumns] = {}
        self._token_copies: dict[str, CopiesToHost] = {}
        signature = executable.signature(f"decode_{self._batches[0]}")
        self._logit_parts = len(_devices_of(signature.outputs, "logits"))
        # Whether a device takes greedy tokens of another one.
        self._moves_tokens = bool(
            _devices_of(signature.inputs, "tokens") - _devices_of(signature.outputs, "greedy_tokens")
        )
        self.machine = VirtualMachine(executable, **self._machine_options)
        executable.release_host_copies()
        self._executable = executable
        self.chunk = self._chunks[-1]
        self._shares_steps = all(map(is_host, self.machine.devices))
        # Placement rules may match the product of the logits, but not their masks: then it takes whole logits.
        mask_inputs = executable.signature(MASKED_TOKENS).inputs if MASKED_TOKENS in names else []
        mask_names = [_plain_name(spec.name) for spec in mask_inputs if isinstance(spec, TensorSpec)]
        self.masks_tokens = bool(mask_names) and mask_names.count("logits") == self._logit_parts
        self._mask_parts = mask_names.count("masks")
        self._mask = self.machine[MASKED_TOKENS] if self.masks_tokens else None

    @property
    def executable(self) -> Executable:
        """The executable; waits for functions that are still being compiled."""
        rest = self._rest  # another thread may take it meanwhile
        return (rest and rest.result()) or self._executable

    @property
    def is_complete(self) -> bool:
        """False while functions are still being compiled, those of the draft model, too."""
        rest = self._rest  # another thread may take it meanwhile
        return (rest is None or rest.done) and (self.draft is None or self.draft.is_complete)

    def wait(self) -> None:
        """Wait for functions that are still being compiled, those of the draft model, too, and use them."""
        if self._rest is not None:
            self._rest.result()
            self._take_rest()
        if self.draft is not None:
            self.draft.wait()

    def _take_rest(self) -> None:
        """Use the functions that were compiled meanwhile, if they are there."""
        if self._rest is None or not self._rest.done:
            return
        executable = self._rest.result()
        if executable is not None:
            self._prepared_calls.clear()
            for name in ("machine", "_executable", "_mask"):  # a GPU might not hold the weights twice
                self.__dict__.pop(name, None)
            self._use(executable)  # after an error, the next call tries again
        self._rest = None

    def prefill(self, slot: int, tokens: np.ndarray | Sequence[int], all_logits: bool = False) -> np.ndarray:
        """Append tokens to a sequence.

        Parameters
        ----------
        slot : int
            Slot of the sequence.
        tokens : array of int, (count,)
            At most `chunk`.
        all_logits : bool
            Whether to return the logits of all tokens; the module must be made with ``all_logits=True``.

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
        self._take_rest()
        count = len(tokens)
        if not 0 < count <= self.chunk:
            raise BindingError(f"prefill: found {count} tokens, expected 1 to {self.chunk}")
        rows = next(rows for rows in self._chunks if rows >= count)
        length = self.cache.length(slot)
        self.cache.extend(slot, count)
        positions = np.arange(length, length + rows)
        positions[count:] = length + count - 1
        results = self._call(f"prefill_{rows}", tokens, positions, np.full(count, slot), count - 1)
        logits = self._to_host(f"prefill_{rows}", results, count if self._has_all_logits else 1)
        return logits[:count] if all_logits else logits[0 if len(logits) == 1 else count - 1]

    @property
    def prompt_chunk(self) -> int:
        """Maximum number of tokens of one call of `prefill_logits`."""
        return self.chunk if self._has_all_logits else max(self._rows_of_a_sequence, 1)

    @property
    def _rows_of_a_sequence(self) -> int:
        """Maximum rows of a step with several of a sequence: on CPUs, calls write all keys before any is computed."""
        return self._verify_rows or (self._max_batch if self._shares_steps else 0)

    @property
    def decode_rows(self) -> int:
        """See `Model`; 0 for models with states, from which rows after a wrong draft cannot be removed."""
        return 0 if self.description.has_states else self._rows_of_a_sequence

    def prefill_logits(self, slot: int, tokens: np.ndarray | Sequence[int]) -> np.ndarray:
        """Append tokens to a sequence, and return the logits of all of them.

        A module made with ``all_logits=True`` prefills them; others decode them, as rows of one call if `decode_rows`
        allows it.

        Parameters
        ----------
        slot : int
            Slot of the sequence.
        tokens : array of int, (count,)
            At most `prompt_chunk`.

        Returns
        -------
        array of float32, (count, vocabulary)
            May be overwritten by the next call.

        Raises
        ------
        CacheError
            If pages run out.
        """
        if self._has_all_logits:
            return self.prefill(slot, tokens, all_logits=True)
        return self.decode([slot] * len(tokens), [int(token) for token in tokens])

    def decode(self, slots: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        """Append one token to each of several sequences.

        Parameters
        ----------
        slots : sequence of int
            Slots of the sequences, each once, or several times if `decode_rows` allows it.
        tokens : sequence of int
            Token of each row.

        Returns
        -------
        array of float32, (len(slots), vocabulary)
            May be overwritten by the next call.

        Raises
        ------
        CacheError
            If pages run out; then no sequence has changed.
        """
        calls = self._decode(slots, tokens)
        if len(calls) == 1:
            return self._to_host(calls[0].function, calls[0].logits, len(slots))[: len(slots)]
        arrays = [self._to_host(call.function, call.logits, call.sequences)[: call.sequences].copy() for call in calls]
        return np.concatenate(arrays)

    def begin_decode(  # type: ignore[override]  # it takes its own steps
        self, slots: Sequence[int], tokens: Sequence[int] | CompiledDecodeStep
    ) -> CompiledDecodeStep:
        """Append one token to each of several sequences, without waiting for GPUs and without copying logits.

        Parameters
        ----------
        slots : sequence of int
            Slots of the sequences, as for `decode`.
        tokens : sequence of int or CompiledDecodeStep
            Token of each sequence, or the last step, which had the same slots, for its greedy tokens.

        Raises
        ------
        CacheError
            If pages run out; then no sequence has changed.
        """
        calls, copies = self._decode(slots, tokens), []
        try:
            for call in calls:
                if call.function not in self._token_copies:
                    self._token_copies[call.function] = CopiesToHost(call.tokens[0])
                copies.append(self._token_copies[call.function].begin(call.tokens[0]))
        except BaseException:
            self._undo_step(slots)
            raise
        return CompiledDecodeStep(calls, copies, self._mask, self._mask_parts)

    def _decode(self, slots: Sequence[int], tokens: Sequence[int] | CompiledDecodeStep) -> list[DecodeCall]:
        """Extend sequences, and call functions for at most the largest batch each; undo the former on any error."""
        if not isinstance(tokens, CompiledDecodeStep):  # whose calls are those of its batches
            self._take_rest()
        slots = list(map(int, slots))
        is_single = len(set(slots)) == len(slots)
        if not is_single and not self._rows_of_a_sequence:
            raise BindingError(
                "decode: found a slot twice, expected each once: this model's steps take one row of each"
            )
        has_verify = not is_single and self._verify_rows
        kind, sizes = ("verify", [self._verify_rows]) if has_verify else ("decode", self._batches)
        positions, calls = self.cache.extend_rows(slots), list[DecodeCall]()
        try:
            for begin in range(0, len(slots), sizes[-1]):
                batch = slice(begin, min(begin + sizes[-1], len(slots)))
                count = batch.stop - batch.start
                rows = next(rows for rows in sizes if rows >= count)
                fed = tokens.calls[len(calls)] if isinstance(tokens, CompiledDecodeStep) else tokens[batch]
                results = self._call(f"{kind}_{rows}", fed, positions[batch], slots[batch], 0)
                logits, greedy = results[: self._logit_parts], results[self._logit_parts :]
                end = end_of_work(greedy[0].device) if self._moves_tokens else None
                calls.append(DecodeCall(f"{kind}_{rows}", count, logits, greedy, end))
        except BaseException:
            self._undo_step(slots)
            raise
        return calls

    def _undo_step(self, slots: Sequence[int]) -> None:
        """Remove a token of the sequence of each row of a failed step."""
        for slot in slots:
            with suppress(CacheError):  # a state that the failed call has changed
                self.cache.truncate(slot, self.cache.length(slot) - 1)

    def token_cost(self, cached: int = 512, profile: bool = False, rounds: int = 8) -> TokenCost:
        """Cost of a decode step of the smallest batch, by parts of the model; it prints as a table.

        Parameters
        ----------
        cached : int
            Cached tokens of each sequence; fewer where the context is shorter.
        profile : bool
            Whether to measure times, which takes a free slot of the cache, and three times `rounds` steps. Parts inside
            of a CUDA graph get no times, since it is measured as a whole.
        rounds : int
            Number of measurements, whose median is returned.

        Raises
        ------
        CacheError
            If there is no free slot to measure with, or no pages.

        Examples
        --------
        >>> model, _ = load("model.gguf")  # doctest: +SKIP
        >>> print(model.token_cost(profile=True))  # doctest: +SKIP
        """
        self.wait()
        metadata, description = self.executable.metadata, self.description
        expert_share = description.experts_used / description.experts if description.experts else 1.0
        cached = max(1, min(cached, self.context - 3 * rounds - 1))
        names = device_names(metadata.devices)
        cost = token_cost(
            metadata.regions,
            metadata.kernels,
            names,
            metadata.placement or (),
            metadata.single_calls,
            cached,
            ModelInfo(description.windows, expert_share, description.vocabulary),
        )
        if cost is None:
            raise BindingError(f"found no command buffer of decode_{self._batches[0]}, expected one")
        return self._add_times(cost, names, rounds) if profile else cost

    def profile(self, cached: int = 512, rounds: int = 5) -> tuple[Profile, Profile]:
        """Profile a decode step of the smallest batch, and the largest prefill of an empty sequence.

        Parameters
        ----------
        cached : int
            Cached tokens of the sequence that is decoded; fewer where the context is shorter.
        rounds : int
            Number of measurements; the one with the median time is returned.

        Raises
        ------
        CacheError
            If there is no free slot to measure with, or no pages.

        Examples
        --------
        >>> model, _ = load("model.gguf")  # doctest: +SKIP
        >>> decode, prefill = model.profile()  # doctest: +SKIP
        """
        self.wait()
        chunk = min(self.chunk, self.context)
        cached = max(1, min(cached, self.context - rounds - 1))
        with self._temporary_sequence(chunk):
            pass  # warm-up: threads start, memory is allocated
        prefills = []
        for _ in range(rounds):
            with self._temporary_sequence(0) as slot:
                prefills.append(self._profile_call(slot, f"prefill_{self.chunk}", chunk))
        with self._temporary_sequence(cached) as slot:
            self.decode([slot], [0])
            decodes = [self._profile_call(slot, f"decode_{self._batches[0]}", 1) for _ in range(rounds)]
        decode, prefill = (
            sorted(profiles, key=lambda profile: profile.microseconds)[rounds // 2] for profiles in (decodes, prefills)
        )
        return decode, prefill

    @contextmanager
    def _temporary_sequence(self, count: int) -> Iterator[int]:
        """Context of a sequence of `count` tokens, which is freed at the end; gives its slot."""
        tokens = np.arange(count) % self.vocabulary
        slot = self.cache.add()
        try:
            for first in range(0, count, self.chunk):
                self.prefill(slot, tokens[first : first + self.chunk])
            yield slot
        finally:
            self.cache.free(slot)

    def _add_times(self, cost: TokenCost, names: Sequence[str], rounds: int) -> TokenCost:
        """Add measured times of a batch of one."""
        decode = f"decode_{self._batches[0]}"
        with self._temporary_sequence(cost.cached) as slot:
            self.decode([slot], [0])  # warm-up: the first call also checks its arguments
            step_seconds, kernel_seconds = [], []
            for _ in range(rounds):  # interleaved, so that other load on the computer affects both alike
                begin = time.perf_counter()
                self.decode([slot], [0])
                step_seconds.append(time.perf_counter() - begin)
                with self.machine.clock_buffers() as clock:  # slows down the work outside of kernels
                    self.decode([slot], [0])
                kernel_seconds.append(clock.seconds)
            profiles = [self._profile_call(slot, decode, 1) for _ in range(rounds)]
        step = StepTime(float(np.median(step_seconds)), float(np.median(kernel_seconds)))
        metadata = self.executable.metadata
        times = [times_of(profile, metadata.regions, metadata.kernels, names) for profile in profiles]
        seconds = {key: float(np.median([each[key] for each in times if key in each])) for key in times[0]}
        return with_times(cost, seconds, step)

    def _profile_call(self, slot: int, function: str, count: int) -> Profile:
        """Profile a function that appends `count` tokens to a sequence."""
        rows, length = int(function.rpartition("_")[2]), self.cache.length(slot)
        self.cache.extend(slot, count)
        positions = length + np.minimum(np.arange(rows), count - 1)
        inputs = self._inputs(function, [0] * count, positions, np.full(count, slot), count - 1)
        pages = self.cache.take()
        try:
            return self.machine.profile(function, *inputs.tensors, *pages, *self.expert_counts.tensors)
        finally:
            self.cache.release(pages)

    def _inputs(self, name: str, tokens: _Tokens, positions: _Integers, slots: _Integers, last: int) -> IntegerInputs:
        """Write and send inputs of a function, for logits of row `last`; rows after those of `slots` are padding."""
        integers = self._integers.get(name)
        if integers is None:
            specs = [spec for spec in self._executable.signature(name).inputs if isinstance(spec, TensorSpec)]
            inputs = [spec for spec in specs if not spec.name.startswith(("pages_", EXPERT_COUNTS))]
            alignment = self._executable.metadata.alignment
            integers = self._integers[name] = IntegerInputs(inputs, self.machine.devices, alignment)
        integers.write_rows(slots, positions)
        if "last" in integers.arrays:
            integers.arrays["last"][:] = last
        if not isinstance(tokens, DecodeCall):
            integers.arrays["tokens"][: len(slots)] = tokens
        integers.send(self.cache.tables, self.cache.tables_version)
        if isinstance(tokens, DecodeCall):
            integers.copy_tokens(tokens.tokens, len(slots), tokens.end)
        return integers

    def _call(
        self, name: str, tokens: _Tokens, positions: _Integers, slots: _Integers, last: int
    ) -> Sequence[runtime.Tensor]:
        """Call a function; returns its results without the pages."""
        inputs, pages = self._inputs(name, tokens, positions, slots, last), self.cache.take()
        key = name, inputs.turn
        try:
            if key not in self._prepared_calls:
                donated = [*pages, *self.expert_counts.tensors]
                arguments = [*inputs.tensors, *donated]
                results = self.machine[name](*arguments)
                results, written = results[: -len(donated)], list(results[-len(donated) :])
                if [tensor.data_ptr() for tensor in written] == [tensor.data_ptr() for tensor in donated]:
                    # Pages were written in place: later calls have the same arguments.
                    self._prepared_calls[key] = self.machine.prepare(name, arguments, results=len(results))
                else:
                    self._prepared_calls.clear()
                    pages, self.expert_counts.tensors = written[: len(pages)], written[len(pages) :]
            else:
                results = self._prepared_calls[key]()
        finally:
            self.cache.release(pages)  # a failed call has written only past the ends of sequences
        self.expert_counts.write_if_due()
        return results

    def _to_host(self, name: str, logits: Sequence[runtime.Tensor], rows: int) -> np.ndarray:
        """The first `rows` rows of logits as a numpy array, (at least `rows`, vocabulary).

        The same memory on a CPU, a new array of the parts of several CPUs, else a buffer that the function's next call
        reuses.
        """
        joined = self._logits.get(name)
        if joined is None:
            if all(is_host(part.device) for part in logits):
                arrays = [np.from_dlpack(part) for part in logits]
                return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=1)
            joined = self._logits[name] = JoinedColumns(logits)
        joined.copy(logits, rows)
        return joined.array


def _check_sums(executable: Executable) -> None:
    """Require NCCL, if GPUs of the model sum by it, and say so, if the caller has not asked for it."""
    why = next((each.why for each in executable.metadata.collectives if each.algorithm == "NCCL"), "")
    if why and isinstance(reason := load_nccl(), str):
        raise HeteroError(f"GPUs of this language model sum by NCCL ({why}), which is missing: {reason}")
    if why and not why.startswith(ASKED_FOR):
        _log.warning("GPUs of this language model sum by NCCL, which takes longer than kernels do: %s", why)


def _row_counts(names: Sequence[str], prefix: str) -> list[int]:
    return sorted(int(name.removeprefix(prefix)) for name in names if name.startswith(prefix))
