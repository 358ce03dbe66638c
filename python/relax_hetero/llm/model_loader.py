"""`rh.llm.load`, `save` and `load_onnx`: compiled models from GGUF files, folders and ONNX decoders."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tvm.ir.transform import PassContext
from tvm.target import Target

from ..artifact.collectives import check_strategy
from ..artifact.file_hints import NO_LANGUAGE_MODEL, describe_value, folder_kind
from ..artifact.metadata import CPU, DeviceSpec
from ..artifact.regular_files import open_regular
from ..encoding.pages import EXPERT_COUNTS, LayerCache
from ..errors import BuildError, EncoderError
from ..garbage_collection import paused_garbage_collection
from ..system import release_freed_memory
from ..target.amx_instructions import amx_instruction_for
from ..target.cpu_target import cpu_target_of
from ..target.hosts import hosts_of
from ..target.make_vdevice import parse_vdevices
from ..target.vdevice import is_cpu
from ..vm.device.nccl_memory import TIMEOUT_SECONDS
from ..vm.device.threads import choose_threads
from .background import BackgroundTask, foreground
from .compiled_model import CompiledModel
from .description import ModelDescription, context_warning
from .folder_tokenizer import load_tokenizer, tokenizer_of
from .json_tokenizer import JsonTokenizer
from .model import TokenizerProtocol
from .params import DEFAULTS_IN_FILES
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from tvm.relax import VDevice

    from ..driver.cached_executables import FileRequest, FileState
    from ..driver.link.parallel_codegen import Progress
    from ..frontend.auto.auto_placement import MemoryLimit
    from ..frontend.gguf.choose_rules import ChosenRules
    from ..frontend.gguf.file import GgufFile
    from ..frontend.gguf.hyperparameters import Hyperparameters
    from ..frontend.gguf.place_experts import ExpertCountsSource
    from ..frontend.onnx.onnx_model import ModelSource
    from ..frontend.onnx.placement_rules import PlacementRules
    from ..frontend.paged_cache import PagedCache
    from ..target.make_vdevice import VDeviceEntry
    from ..vm.file.executable import Executable

Loaded: TypeAlias = "tuple[CompiledModel, Tokenizer | JsonTokenizer]"

BATCHES, CHUNKS = (1, 2, 4, 8), (32, 256)
"""Default batch sizes of decode functions, and chunk lengths of prefill functions."""
MIXTURE_CHUNKS = (32, 512, 2048)
"""Default chunk lengths of mixtures of experts with a GPU: rows share the time to read, or to copy, all experts."""
CONTEXT = 4096  # default maximum number of tokens of a sequence, unless the model was trained for fewer

_log = logging.getLogger("relax_hetero")

_LIBRARY, _DESCRIPTION, _TOKENIZER, _DIGESTS = "model.so", "model.json", "tokenizer.gguf", "files"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "genai_config.json",
)
"""Files that tokenizers of folders read."""
# Bytes at the end of each file that are hashed (None: all); the end of a library holds checksums of its sections.
_DIGEST_BYTES = {_LIBRARY: 4096, _TOKENIZER: None, **dict.fromkeys(_TOKENIZER_FILES)}
_DEFAULTS = {
    "batches": BATCHES,
    "chunks": None,
    "slots": None,
    "context": None,
    "page_type": "float16",
    "memory_limit": None,
    "activation_bits": 8,
    "activations": None,
    "count_experts": False,
    "expert_counts": None,
    "stream_experts": "auto",
    "verify_drafts": False,
}
"""Default options of GGUF files in `load`."""
_DRAFT_OPTIONS = ("batches", "slots", "context")  # those that a draft model gets, too
_ONNX_OPTIONS = ("batches", "chunks", "slots", "context", "page_type")  # those that apply to ONNX decoders, too
BACKGROUND_LAYERS = 8  # minimum layers of a model whose functions are compiled in two parts: fewer compile in seconds
BACKGROUND_BYTES = 4 << 30  # maximum bytes of such a model's files, since both parts pack all weights


@dataclass(frozen=True)
class _Arguments:
    """Arguments of `load`; `options` are those of `rh.from_gguf`, and `machine_options` those of `VirtualMachine`."""

    path: Path
    vdevices: VDeviceEntry | Iterable[VDeviceEntry] | None
    placement: PlacementRules | Literal["auto"] | None
    options: dict[str, Any]
    batch_invariant: bool
    background: bool
    drafted: Loaded | None
    allreduce_strategy: str
    progress: Progress | None
    machine_options: dict[str, Any]

    @property
    def devices(self) -> list[VDevice]:
        """Devices of the model; the native CPU by default."""
        return parse_vdevices(["llvm"] if self.vdevices is None else self.vdevices)


@foreground()
@paused_garbage_collection()
def load(
    path: str | os.PathLike[str],
    vdevices: VDeviceEntry | Iterable[VDeviceEntry] | None = None,
    placement: PlacementRules | Literal["auto"] | None = None,
    *,
    batches: Sequence[int] = BATCHES,
    chunks: Sequence[int] | None = None,
    slots: int | None = None,
    context: int | None = None,
    page_type: str = "float16",
    memory_limit: MemoryLimit | None = None,
    activation_bits: int = 8,
    activations: str | None = None,
    count_experts: bool = False,
    expert_counts: ExpertCountsSource | None = None,
    stream_experts: int | Literal["auto"] | None = "auto",
    batch_invariant: bool = False,
    background: bool = True,
    draft: str | os.PathLike[str] | Loaded | None = None,
    draft_vdevices: VDeviceEntry | Iterable[VDeviceEntry] | None = None,
    draft_placement: PlacementRules | Literal["auto"] | None = None,
    verify_drafts: bool | None = None,
    tensor_parallel: int = 1,
    allreduce_strategy: str = "auto",
    threads: int | None = None,
    cores: Sequence[int] | None = None,
    spin: bool = True,
    collective_timeout: float = TIMEOUT_SECONDS,
    progress: Progress | None = None,
) -> Loaded:
    """Load a language model and its tokenizer.

    Parameters
    ----------
    path : str or path
        GGUF file or a folder of Hugging Face (``config.json``, ``*.safetensors`` and a tokenizer), which is imported
        and compiled (or found in the compile cache); a folder with an ONNX decoder, see `load_onnx`; or a folder that
        `save` wrote.
    vdevices, placement, batches, slots, page_type, memory_limit, activation_bits, activations, expert_counts
        As for `rh.from_gguf`; not for a saved folder. ONNX decoders take the first five.
    chunks : sequence of int, optional
        As for `rh.from_gguf`; by default 32 and 256, for a mixture of experts with a GPU 32, 512 and 2,048. Not for a
        saved folder.
    stream_experts
        As for `rh.from_gguf`; not for a saved folder, nor for ONNX decoders.
    count_experts : bool
        Whether the model counts the tokens that choose each expert, in its `expert_counts`; that of a saved folder has
        to be compiled so.
    context : int, optional
        Maximum number of tokens of a sequence; by default 4,096, or the context that the model was trained
        with if that is shorter. A longer context than that logs a warning. Shorter ones share one executable,
        except those of the placement "auto". Not for a saved folder.
    batch_invariant : bool
        Whether a sequence's logits must have the same bits for any batch size and any chunks of its prompt. On CPUs
        they always do, except those of mixtures of experts with AMX. There and on other devices, every call then
        computes the largest batch or chunk, so that one sequence takes as long as a full batch. Not for a
        saved folder.
    background : bool
        Whether a model of many layers that is not in the compile cache is returned as soon as it can generate one text:
        functions of larger batches, and on CPUs of longer chunks, are compiled by a thread, and used from then on.
        `CompiledModel.wait` waits for them. The thread ends with the process, or with the model.
    draft : str, path or result of `load`, optional
        Draft model for speculative decoding: a smaller model with the same tokens, in the forms of `path`, which gets
        the same `batches`, `slots` and `context`.
    draft_vdevices, draft_placement
        As `vdevices` and `placement`, for the draft model; by default `vdevices`, the first of which has all of it.
    verify_drafts : bool, optional
        Whether GPUs can verify drafts, those of prompt look-up, too, which takes a function more to compile; by default
        with a draft model. CPUs always can.
    tensor_parallel : int
        As for `rh.from_gguf`; not for a saved folder, nor for ONNX decoders.
    allreduce_strategy : str
        As for `rh.compile`; not for a saved folder, nor for ONNX decoders.
    threads, cores, spin
        As for `rh.vm.VirtualMachine`, also for a draft model that `draft` names: threads of this model alone, whatever
        other models of the process use.
    collective_timeout : float
        As for `rh.vm.VirtualMachine`.
    progress : callable, optional
        As for `rh.compile`.

    Raises
    ------
    HeteroError
        If the file or folder cannot be read, placed or compiled, or options are given that do not apply: those of a
        saved folder are compiled already. Also if the draft model has other tokens.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise BuildError(
            f"rh.llm.load: {describe_value(path)}; expected the path of a GGUF file, of a folder of Hugging Face or "
            "with an ONNX decoder, or of a folder that was saved"
        )
    check_strategy(allreduce_strategy, "rh.llm.load")
    options = {
        "batches": tuple(batches),
        "chunks": None if chunks is None else tuple(chunks),
        "slots": slots,
        "context": context,
        "page_type": page_type,
        "memory_limit": memory_limit,
        "activation_bits": activation_bits,
        "activations": activations,
        "count_experts": count_experts,
        "expert_counts": expert_counts,
        "stream_experts": stream_experts,
        "verify_drafts": bool(verify_drafts),
    }
    own_threads: dict[str, Any] = {"threads": threads, "cores": cores, "spin": spin}
    machine_options = {**own_threads, "collective_timeout": collective_timeout}
    draft_devices = vdevices if draft_vdevices is None else draft_vdevices
    loading: dict[str, Any] = {"background": background, "progress": progress, **machine_options}
    if draft is None and (draft_vdevices, draft_placement) != (None, None):
        raise BuildError("rh.llm.load: found draft_vdevices or draft_placement, expected them with draft=")
    drafted = _load_draft(draft, draft_devices, draft_placement, options, loading)  # first, as it is the smaller one
    load_kind = _LOADERS.get(folder_kind(path)) if Path(path).is_dir() else _load_file
    for name, value, default in (
        ("tensor_parallel", tensor_parallel, 1),
        ("allreduce_strategy", allreduce_strategy, "auto"),
    ):
        if value != default and load_kind is not _load_file:
            raise BuildError(f"{Path(path)}: {name}={value!r} applies to GGUF files and folders of Hugging Face only")
    if tensor_parallel != 1:
        from ..frontend.parallel_devices import parallel_devices

        vdevices, placement = parallel_devices(vdevices, placement, tensor_parallel=tensor_parallel)
    if verify_drafts is None:
        options["verify_drafts"] = draft is not None and load_kind is _load_file
    if load_kind is None:
        given = (vdevices, placement, batch_invariant, {**options, "count_experts": False})
        has_options = given != (None, None, False, _DEFAULTS)
        loaded = _load_compiled(Path(path), has_options, count_experts, drafted, machine_options)
    else:
        arguments = _Arguments(
            Path(path), vdevices, placement, options, batch_invariant, background, drafted, allreduce_strategy,
            progress, machine_options,
        )  # fmt: skip
        if hosts := hosts_of(arguments.devices):
            raise BuildError(
                f"{Path(path)}: vdevices are on hosts {', '.join(map(repr, hosts))}, expected devices of this host: a "
                "language model is on one host; each host can serve replicas of its own"
            )
        # Before the model is compiled, which may take minutes.
        choose_threads([DeviceSpec(str(device.target)) for device in arguments.devices], **own_threads)
        loaded = load_kind(arguments)
    return _with_draft(_warn_of_long_context(*loaded), drafted)


def _load_draft(
    draft: str | os.PathLike[str] | Loaded | None,
    vdevices: VDeviceEntry | Iterable[VDeviceEntry] | None,
    placement: PlacementRules | Literal["auto"] | None,
    options: dict[str, Any],
    loading: dict[str, Any],
) -> Loaded | None:
    """The draft model, loaded if it is a path; `options` are those of its model."""
    if not isinstance(draft, (str, os.PathLike, tuple, NoneType)):
        raise BuildError(
            f"rh.llm.load: draft: {describe_value(draft)}; expected the path of a smaller model, or the pair that "
            "rh.llm.load returned for it"
        )
    if not isinstance(draft, (str, os.PathLike)):
        return draft
    try:
        return load(draft, vdevices, placement, **{name: options[name] for name in _DRAFT_OPTIONS}, **loading)
    except EncoderError as error:  # not what callers know of the model's path
        raise BuildError(f"draft: {error}") from error


def _load_compiled(
    folder: Path, has_options: bool, count_experts: bool, drafted: Loaded | None, machine_options: dict[str, Any]
) -> Loaded:
    """Load a folder that `save` wrote."""
    if has_options and (folder / _DESCRIPTION).exists():
        names = "vdevices, placement, context, slots and other options"
        raise BuildError(f"{folder}: is compiled already; {names} apply only to files with weights")
    model, tokenizer = _load_saved(folder, machine_options)
    _check_draft_tokens(tokenizer, drafted)
    if count_experts and not model.expert_counts.tensors:
        raise BuildError(
            f"{folder}: its functions do not count experts; load the GGUF file of a mixture with "
            "count_experts=True, and save it again"
        )
    return model, tokenizer


def _load_file(arguments: _Arguments) -> Loaded:
    """Import a GGUF file, or a folder as one, and compile it."""
    from ..driver.cached_executables import states_of
    from ..frontend.gguf.hyperparameters import hyperparameters_of
    from ..frontend.gguf.tensor_parallel import split_caches
    from ..frontend.language_model_files import read_language_model

    path, devices = arguments.path, arguments.devices
    states = states_of(path)  # before it is opened: a later change makes another request
    file = read_language_model(path)
    model = hyperparameters_of(file)
    tokenizer = tokenizer_of(file)
    _check_draft_tokens(tokenizer, arguments.drafted)
    _check_draft_layers(path, model, arguments.drafted)
    context = min(model.context, CONTEXT) if arguments.options["context"] is None else arguments.options["context"]
    options, rules = _resolve_options(arguments, model, devices, context), arguments.placement
    if isinstance(rules, str):
        rules, options = _chosen_rules(file, model, devices, options)
    caches, parts = split_caches(model, rules or {}, devices)
    donated = [f"pages_{index}" for index in range(len(caches))]
    if options["count_experts"]:
        donated += [f"{EXPERT_COUNTS}{layer}" for layer in range(model.dense_layers, model.layers)]
    is_mixed = 0 < sum(map(is_cpu, devices)) < len(devices)
    is_measured = arguments.placement == "auto" or (model.experts > 0 and is_mixed)
    compilation = _Compilation(
        file, states, is_measured, devices, rules, options, donated, arguments.allreduce_strategy
    )
    is_invariant = all(is_batch_invariant(device.target) for device in devices)
    executable, rest = compilation.load(), None
    if executable is None and _is_split(arguments, model, compilation):
        first = compilation.first_part(is_invariant)
        executable = first.load() or first.compile(arguments.progress)
        rest = BackgroundTask(partial(compilation.compile_rest, first, PassContext.current()))
    elif executable is None:
        executable = compilation.compile(arguments.progress)
    description = _description(file, model, options, context, caches, parts, is_invariant)
    all_rows = max(options["batches"]), max(options["chunks"])
    return CompiledModel(executable, description, rest, all_rows, **arguments.machine_options), tokenizer


def _description(
    file: GgufFile,
    model: Hyperparameters,
    options: dict[str, Any],
    context: int,
    caches: tuple[LayerCache, ...],
    parts: tuple[int, ...],
    is_invariant: bool,
) -> ModelDescription:
    return ModelDescription(
        name=str(file.fields.get("general.name", file.path.stem)),
        vocabulary=model.vocabulary,
        context=context,
        slots=options["slots"],
        layers=caches,
        cache_parts=parts if any(count > 1 for count in parts) else (),
        page_type=options["page_type"],
        experts=model.experts,
        experts_used=model.experts_used,
        trained_context=model.context,
        decodes_like_prefill=is_invariant,
    )


def compile_layers(
    file: GgufFile,
    vdevices: Sequence[VDevice],
    placement: PlacementRules | None,
    batches: Sequence[int],
    chunks: Sequence[int],
    context: int,
) -> CompiledModel:
    """Compile a file, such as the first layers of a model, to measure devices; the arguments are those of `load`."""
    from ..frontend.gguf.hyperparameters import hyperparameters_of
    from ..frontend.gguf.tensor_parallel import split_caches

    model, is_invariant = hyperparameters_of(file), is_batch_invariant(vdevices[0].target)
    options = {"batches": tuple(batches), "chunks": tuple(chunks), "slots": max(batches), "page_type": "float16"}
    options |= {"context": model.compiled_context(context), "verify_rows": 0}
    caches, parts = split_caches(model, placement or {}, vdevices)
    donated = [f"pages_{index}" for index in range(len(caches))]
    executable = _Compilation(file, (), True, list(vdevices), placement, options, donated, "auto").compile(None)
    return CompiledModel(executable, _description(file, model, options, context, caches, parts, is_invariant))


def _chosen_rules(
    file: GgufFile, model: Hyperparameters, devices: list[VDevice], options: dict[str, Any]
) -> tuple[ChosenRules, dict[str, Any]]:
    """Rules of ``placement="auto"``, and the options without those that it reads."""
    from ..frontend import CostModel, PagedCache
    from ..frontend.auto.auto_placement import memory_limits
    from ..frontend.gguf.choose_rules import choose_rules
    from ..frontend.gguf.place_experts import read_expert_counts
    from ..frontend.gguf.place_layers import LayerProblem

    names = ("batches", "chunks", "slots", "context", "page_type", "verify_rows", "masks_tokens")
    cache = PagedCache(**{name: options[name] for name in names}, any_pages=True)
    limits, counts = (
        memory_limits(options["memory_limit"], devices),
        read_expert_counts(options["expert_counts"], model),
    )
    problem = LayerProblem(file, model, cache, devices, CostModel.measured(devices), limits, counts)
    rules = choose_rules(problem, may_share=not options["count_experts"])
    return rules, {**options, "memory_limit": None, "expert_counts": None}


def _resolve_options(
    arguments: _Arguments, model: Hyperparameters, devices: list[VDevice], context: int
) -> dict[str, Any]:
    """Options of `rh.from_gguf` in place of those that were left to defaults."""
    from ..frontend.paged_cache import PagedCache

    options, batch_invariant = dict(arguments.options), arguments.batch_invariant
    batches, chunks = options["batches"], options["chunks"]
    if chunks is None:  # with equal bits, every call computes the longest
        chunks = CHUNKS if batch_invariant else default_chunks(model, devices, context)
    # The constructor also checks the options.
    slots = PagedCache(batches, chunks, options["slots"], context, options["page_type"]).sequences
    # CPU functions sum in the same order for any number of rows, except that AMX multiplies experts of many rows.
    is_invariant = all(
        is_cpu(device) and (not model.experts or is_batch_invariant(device.target)) for device in devices
    )
    if batch_invariant and not is_invariant:
        batches, chunks = (max(batches),), (max(chunks),)
    # Code depends on the longest context only, so that another context of the file compiles nothing.
    columns = context if arguments.placement == "auto" else model.compiled_context(context)
    on_gpus = not all(map(is_cpu, devices))
    can_rewind = not any(cache.state for cache in model.caches)
    options["verify_rows"] = max(batches) if options.pop("verify_drafts") and on_gpus and can_rewind else 0
    options["masks_tokens"] = on_gpus
    return {**options, "batches": batches, "chunks": chunks, "slots": slots, "context": columns}


@dataclass(frozen=True)
class _Compilation:
    """Functions of a file that are compiled together, or found in the compile cache."""

    file: GgufFile  # file that has been read
    states: tuple[FileState, ...]  # its files, before they were opened
    is_measured: bool  # whether the result depends on measurements of the devices
    devices: list[VDevice]
    placement: PlacementRules | None
    options: dict[str, Any]  # options of `rh.from_gguf`
    donated: list[str]  # inputs that functions write in place
    allreduce_strategy: str  # option of `rh.compile`

    @property
    def functions(self) -> list[str]:
        """Names of the functions."""
        options, verify_rows = self.options, self.options["verify_rows"]
        names = [("decode", options["batches"]), ("prefill", options["chunks"])]
        if verify_rows:
            names.append(("verify", (verify_rows,)))
        return [f"{name}_{count}" for name, counts in names for count in counts]

    @cached_property
    def request(self) -> FileRequest | None:
        """The request for an executable that follows from files and options; None if it depends on measured devices."""
        from ..driver.cached_executables import FileRequest
        from ..transform.shard.exchange_by_nccl import unreachable

        if self.is_measured:
            return None
        rules: list[tuple[str, str]] = []
        if self.placement:
            from ..frontend.onnx.placement_rules import rule_pairs  # imports onnx

            rules = [(pattern, str(device)) for pattern, device in rule_pairs(self.placement)]
        gpus = tuple(int(device.vdevice_id) for device in self.devices if not is_cpu(device))
        sums = self.allreduce_strategy, unreachable(gpus)
        return FileRequest(self.states, self.devices, repr([rules, self.options, self.functions, self.donated, sums]))

    def first_part(self, is_invariant: bool) -> _Compilation:
        """The functions that one text needs; all chunks of its prompt, unless other ones give equal bits."""
        chunks = (min(self.options["chunks"]),) if is_invariant else self.options["chunks"]
        return replace(self, options={**self.options, "batches": (min(self.options["batches"]),), "chunks": chunks})

    def load(self) -> Executable | None:
        """The executable, if the compile cache has it."""
        return None if self.request is None else self.request.load()

    def compile(self, progress: Progress | None) -> Executable:
        """Import and compile the file, and give back the memory that this took."""
        from ..driver.compile import compile as compile_module
        from ..frontend.from_gguf import from_gguf

        donate = dict.fromkeys(self.functions, self.donated)
        with paused_garbage_collection():
            mod = from_gguf(self.file, self.devices, self.placement, **self.options)
            executable = compile_module(
                mod, donate=donate, allreduce_strategy=self.allreduce_strategy, progress=progress
            )
            del mod
        if self.request is not None:
            self.request.store(executable)
        self.file.release_pages()
        release_freed_memory()
        return executable

    def compile_rest(self, first: _Compilation, context: PassContext, check: Callable[[], None]) -> Executable:
        """Compile all functions in place of a first part, which leaves the compile cache; `check` may end it."""
        from ..driver.link.parallel_codegen import copy_of

        with copy_of(context):  # contexts belong to threads
            executable = self.compile(lambda *_progress: check())
        if first.request is not None:
            first.request.drop()
        return executable


def _is_split(arguments: _Arguments, model: Hyperparameters, compilation: _Compilation) -> bool:
    """Return whether the functions that one text needs are compiled before the others."""
    request, options = compilation.request, compilation.options
    if not arguments.background or arguments.options["memory_limit"] is not None or len(options["batches"]) == 1:
        return False
    if request is None or not request.is_cacheable or Target.current(allow_none=True) is not None:
        return False
    file_bytes = sum(state.size for state in compilation.states)
    return model.layers >= BACKGROUND_LAYERS and file_bytes <= BACKGROUND_BYTES


def default_chunks(model: Hyperparameters, vdevices: Sequence[VDevice], context: int) -> tuple[int, ...]:
    """Chunk lengths of a model's prefill functions, unless they are given: none far beyond the context."""
    if model.experts == 0 or all(map(is_cpu, vdevices)):
        return CHUNKS
    return tuple(rows for rows in MIXTURE_CHUNKS if rows <= max(context, max(CHUNKS)))


def default_cache(
    model: Hyperparameters, vdevices: Sequence[VDevice], context: int | None, slots: int | None
) -> PagedCache:
    """Functions and sequences of a model as `load` makes them by default, for plans.

    `context`: tokens of a text, None for that of `load`; `slots`: maximum number of sequences, None for the largest
    batch.
    """
    from ..frontend.paged_cache import PagedCache

    context = context or min(model.context, CONTEXT)
    return PagedCache(BATCHES, default_chunks(model, vdevices, context), slots, context)


def _load_onnx_folder(arguments: _Arguments) -> Loaded:
    """Load the ONNX decoder of a folder, with the tokenizer next to it."""
    folder, placement, options = arguments.path, arguments.placement, arguments.options
    others = [name for name, value in options.items() if name not in _ONNX_OPTIONS and value != _DEFAULTS[name]]
    if others or isinstance(placement, str):
        name = others[0] if others else f"placement {placement!r}"
        raise BuildError(
            f"{folder}: {name} does not apply to an ONNX decoder, expected rules, {', '.join(_ONNX_OPTIONS)}"
        )
    tokenizer = load_tokenizer(folder)
    _check_draft_tokens(tokenizer, arguments.drafted)
    used = {name: options[name] for name in _ONNX_OPTIONS if options[name] is not None}
    used |= {"batch_invariant": arguments.batch_invariant, "progress": arguments.progress}
    model = load_onnx(folder, arguments.vdevices, placement, **used, **arguments.machine_options)
    return model, tokenizer


_LOADERS: dict[str | None, Callable[[_Arguments], Loaded]] = {"hub": _load_file, "genai": _load_onnx_folder}
"""Functions that load the model of a folder that is not compiled, by its kind."""


def is_batch_invariant(target: Target) -> bool:
    """Return whether kernels for a target sum each row in the same order for any number of rows.

    CPUs do, except those with AMX, which use tiles for many rows and vectors for few.
    """
    if int(target.get_target_device_type()) != CPU:
        return False
    return amx_instruction_for(cpu_target_of(target), "bfloat16", "bfloat16", "float32") is None


def save(model: CompiledModel, source: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Save a compiled model as a folder that `load` reads without a compiler and without the model's file.

    Parameters
    ----------
    model : CompiledModel
        Model as `load` returns it for a GGUF file or a folder of Hugging Face.
    source : str or path
        This file or folder, whose tokenizer is copied.
    folder : str or path
        Folder; created if it does not exist.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    model.executable.export_library(target / _LIBRARY)
    names = [_LIBRARY, *copy_tokenizer(Path(source), target)]
    fields = {**asdict(model.description), _DIGESTS: {name: _digest(target / name) for name in names}}
    (target / _DESCRIPTION).write_text(json.dumps(fields, indent=1))


def _warn_of_long_context(model: CompiledModel, tokenizer: Tokenizer | JsonTokenizer) -> Loaded:
    warning = context_warning(model.context, model.trained_context)
    if warning is not None:
        _log.warning(warning)
    return model, tokenizer


def _with_draft(loaded: Loaded, drafted: Loaded | None) -> Loaded:
    """Give a model its draft model, if there is one."""
    if drafted is not None:
        loaded[0].draft = drafted[0]
    return loaded


def _check_draft_tokens(tokenizer: TokenizerProtocol, drafted: Loaded | None) -> None:
    """Raise BuildError if a token has other bytes in the draft model; control tokens and missing ones have none."""
    if drafted is None:
        return
    draft, draft_tokenizer = drafted
    for token in range(draft.vocabulary):
        piece, draft_piece = tokenizer.piece(token), draft_tokenizer.piece(token)
        if piece != draft_piece and piece and draft_piece:
            raise BuildError(
                f"draft: its token {token} is {draft_piece!r}, expected {piece!r} as in the model: a draft model must "
                "have the same vocabulary, such as a smaller model of the same family"
            )


def _check_draft_layers(path: Path, model: Hyperparameters, drafted: Loaded | None) -> None:
    """Raise BuildError if the model, or its draft model, keeps states, from which no wrong token can be removed."""
    if drafted is None:
        return
    for name, layers in ((str(path), model.caches), ("its draft model", drafted[0].description.layers)):
        if any(layer.state for layer in layers):
            raise BuildError(
                f"draft: {name} has layers that keep a state, from which wrong drafts cannot be removed; load the "
                "model without draft="
            )


def _load_saved(folder: Path, machine_options: dict[str, Any]) -> Loaded:
    from ..vm import load as load_library

    path = folder / _DESCRIPTION
    try:
        with open_regular(path)[0] as file:
            fields: dict[str, Any] = json.loads(file.read())
        digests = dict(fields.pop(_DIGESTS))
        fields["layers"] = tuple(LayerCache(**layer) for layer in fields["layers"])
        fields["cache_parts"] = tuple(fields.get("cache_parts", ()))
        description = ModelDescription(**fields)
    except (OSError, ValueError, TypeError, KeyError) as error:
        if not path.exists():
            raise BuildError(f"{folder}: {NO_LANGUAGE_MODEL}") from error
        raise BuildError(f"{path}: does not describe a saved language model: {error}") from error
    is_from_gguf = not any(name in digests for name in _TOKENIZER_FILES)
    for name in (_LIBRARY, *([_TOKENIZER] if is_from_gguf else [name for name in _TOKENIZER_FILES if name in digests])):
        if _digest(folder / name) != digests.get(name):
            raise BuildError(f"{folder / name}: found another file than {path} was saved with; save the model again")
    tokenizer = Tokenizer.from_gguf(folder / _TOKENIZER) if is_from_gguf else load_tokenizer(folder)
    return CompiledModel(load_library(folder / _LIBRARY), description, **machine_options), tokenizer


def _digest(path: Path) -> str:
    """Hash of a file of a saved model."""
    try:
        file, status = open_regular(path)
        with file:
            size = _DIGEST_BYTES[path.name]
            if size is not None:
                file.seek(max(status.st_size - size, 0))
            return hashlib.blake2b(file.read(), digest_size=20).hexdigest()
    except OSError as error:
        raise BuildError(f"{path}: cannot be read: {error.strerror or error}") from error


def copy_tokenizer(source: Path, target: Path) -> list[str]:
    """Copy a folder's files of its tokenizer, or write a GGUF file with only its metadata; return their names.

    `source`: GGUF file, or folder with a tokenizer; `target`: folder to write to.
    """
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    if source.is_dir():
        names = [name for name in _TOKENIZER_FILES if (source / name).is_file()]
        for name in names:
            shutil.copyfile(source / name, target / name)
        return names
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target / _TOKENIZER, architecture)
    for name, field in reader.fields.items():
        if name.startswith("tokenizer.") or name in DEFAULTS_IN_FILES.values():
            element_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=element_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return [_TOKENIZER]


def load_onnx(
    source: ModelSource,
    vdevices: VDeviceEntry | Iterable[VDeviceEntry] | None = None,
    placement: PlacementRules | None = None,
    *,
    batches: Sequence[int] = BATCHES,
    chunks: Sequence[int] = CHUNKS,
    slots: int | None = None,
    context: int = CONTEXT,
    page_type: str = "float16",
    batch_invariant: bool = False,
    threads: int | None = None,
    cores: Sequence[int] | None = None,
    spin: bool = True,
    collective_timeout: float = TIMEOUT_SECONDS,
    progress: Progress | None = None,
) -> CompiledModel:
    """Load an ONNX decoder, with its ``past_key_values`` in a paged cache.

    Parameters
    ----------
    source : str, path, bytes or onnx.ModelProto
        Model with GroupQueryAttention nodes as onnxruntime-genai writes it, or its folder with ``genai_config.json``.
    vdevices, placement
        As for `rh.from_onnx`.
    batches, chunks, slots, context, page_type
        As for `rh.PagedCache`.
    batch_invariant : bool
        As for `load`.
    threads, cores, spin, collective_timeout
        As for `rh.vm.VirtualMachine`.
    progress : callable, optional
        As for `rh.compile`.

    Returns
    -------
    CompiledModel
        Compiled model; an `Engine` also needs a tokenizer, such as ``load_tokenizer(folder)``.

    Raises
    ------
    HeteroError
        If the model cannot be read, lacks ``past_key_values``, or cannot be placed or compiled.
    """
    from ..driver.compile import compile as compile_module
    from ..frontend import PagedCache
    from ..frontend.from_onnx import from_onnx

    if isinstance(source, (str, os.PathLike)) and Path(source).is_dir():
        source = _find_decoder(Path(source))
    devices = parse_vdevices(["llvm"] if vdevices is None else vdevices)
    slots = PagedCache(tuple(batches), tuple(chunks), slots, context, page_type).sequences
    if batch_invariant and not all(is_batch_invariant(device.target) for device in devices):
        batches, chunks = (max(batches),), (max(chunks),)
    cache = PagedCache(tuple(batches), tuple(chunks), slots, context, page_type)
    mod = from_onnx(source, devices, placement, cache=cache)
    decoder: dict[str, Any] = mod[f"decode_{cache.batches[0]}"].attrs["decoder"]
    sizes = zip(decoder["kv_heads"], decoder["windows"], strict=True)
    layers = tuple(LayerCache(int(heads), int(decoder["size"]), int(window)) for heads, window in sizes)
    pages = [f"pages_{layer}" for layer in range(len(layers))]
    names = [f"decode_{rows}" for rows in cache.batches] + [f"prefill_{rows}" for rows in cache.chunks]
    executable = compile_module(mod, donate=dict.fromkeys(names, pages), progress=progress)
    logits: Any = next(spec for spec in executable.signature(names[0]).outputs if spec.name == "logits")
    description = ModelDescription(
        name=Path(source).stem if isinstance(source, (str, os.PathLike)) else "model",
        vocabulary=int(logits.shape[-1]),
        context=context,
        slots=cache.sequences,
        layers=layers,
        page_type=page_type,
        decodes_like_prefill=all(is_batch_invariant(device.target) for device in devices),
    )
    return CompiledModel(
        executable, description, threads=threads, cores=cores, spin=spin, collective_timeout=collective_timeout
    )


def _find_decoder(folder: Path) -> Path:
    """ONNX file in a folder of onnxruntime-genai."""
    config = folder / "genai_config.json"
    if not config.is_file():
        return folder / "model.onnx"
    try:
        return folder / str(json.loads(config.read_text("utf-8"))["model"]["decoder"]["filename"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BuildError(f"{config}: does not name the decoder's file: {type(error).__name__}: {error}") from error
