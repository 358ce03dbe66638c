"""A compiled model's sequences: forked, truncated, and over two devices, each gives what it gives alone."""

import json
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import tvm
import tvm_ffi

import relax_hetero as rh
from llm.gguf_files import Sizes, write_gguf
from llm.run_gguf import check_steps_ahead
from relax_hetero.artifact.metadata import HIT
from relax_hetero.artifact.signature import TensorSpec
from relax_hetero.errors import BuildError, CacheError, HeteroError
from relax_hetero.frontend.gguf.file import read_gguf
from relax_hetero.llm import Engine, SamplingParams, compiled_model, model_loader
from relax_hetero.llm.background import BackgroundTask
from relax_hetero.llm.compiled_model import CompiledModel
from relax_hetero.llm.draft_model import DraftModel
from relax_hetero.llm.speculation import StepTimes
from relax_hetero.report.executable_report import report_of
from relax_hetero.system import allowed_cpus
from relax_hetero.vm.device import cuda_copies, host_copies
from relax_hetero.vm.device.host_copies import CopiesToHost, JoinedColumns
from relax_hetero.vm.device.tensors import alias
from relax_hetero.vm.device.threads import Threads
from vm.fake_cuda import FakeCuda, FakeLibrary

# A shape of no other test: three heads on one, a window, rows of 224.
SIZES = Sizes("gemma3", layers=2, width=224, feed_forward=288, heads=3, kv_heads=1, size=32, window=80, pattern=2)
TWO = ["llvm", {"kind": "llvm", "mcpu": "x86-64-v3"}]
TOKENS = np.random.default_rng(8).integers(3, 320, 150).tolist()


def loaded(folder, sizes=SIZES, **options):
    path = write_gguf(folder / "model.gguf", sizes, "Q8_0")
    options = {"context": 320, **options}
    return rh.llm.load(path, batches=(2,), chunks=(32,), slots=3, page_type="float32", **options)


@pytest.fixture(scope="module")
def cache_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory, cache_folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELAX_HETERO_CACHE", str(cache_folder))
        return loaded(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def varied(tmp_path_factory):
    """A model whose greedy texts do not repeat one token, as those of random tied embeddings do."""
    sizes = Sizes(layers=1, width=128, feed_forward=64, heads=2, kv_heads=1, size=32)
    return loaded(tmp_path_factory.mktemp("varied"), sizes)


def test_threads_of_its_own(model, tmp_path, cache_folder, monkeypatch):
    """Options of the machine leave the bits as they are; wrong ones are refused before anything is compiled."""
    monkeypatch.setenv("RELAX_HETERO_CACHE", str(cache_folder))
    cpus = sorted(allowed_cpus())[:1]
    own, _ = loaded(tmp_path, threads=1, cores=cpus, spin=False)
    assert replace(own.machine._threads, use_tvm_pool=False) == Threads(1, False, True, 0, tuple(cpus))
    logits = []
    for each in (model[0], own):
        slot = each.cache.add()
        logits.append([each.prefill(slot, TOKENS[:20]).copy(), each.decode([slot], [TOKENS[20]]).copy()])
        each.cache.free(slot)
    for ours, expected in zip(*logits, strict=True):
        np.testing.assert_array_equal(ours, expected)
    for options, message in (({"threads": 0}, "threads is 0, expected 1 to"), ({"cores": [-1]}, r"cores is \[-1\]")):
        with pytest.raises(rh.BindingError, match=message):
            rh.llm.load(tmp_path / "absent.gguf", **options)
    rh.llm.save(own, tmp_path / "model.gguf", tmp_path / "saved")
    saved, _ = rh.llm.load(tmp_path / "saved", threads=1)
    assert saved.machine._threads.is_fixed and saved.machine._threads.width == 1


@pytest.fixture(scope="module")
def by_layers(tmp_path_factory):
    placement = {"blk.0.*": "llvm", "token_embd*": "llvm", "*": "llvm:1"}
    return loaded(tmp_path_factory.mktemp("two"), vdevices=TWO, placement=placement)


def fill(model, tokens) -> int:
    """A new sequence of some tokens."""
    slot = model.cache.add()
    for begin in range(0, len(tokens), model.chunk):
        model.prefill(slot, tokens[begin : begin + model.chunk])
    return slot


def logits_alone(model, tokens) -> np.ndarray:
    """Logits of the last of `tokens`, which are alone in the cache."""
    slot = fill(model, tokens[:-1])
    try:
        return model.decode([slot], tokens[-1:])[0].copy()
    finally:
        model.cache.free(slot)


def test_forked_and_cut_sequences(by_layers):
    model, _ = by_layers
    expected = [logits_alone(model, [*TOKENS[:100], last]) for last in (7, 8)]
    cut = logits_alone(model, [*TOKENS[:40], 9])
    first = fill(model, TOKENS[:100])
    second = model.cache.fork(first)
    actual = model.decode(np.array([first, second]), [7, 8])
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    model.cache.truncate(second, 40)
    np.testing.assert_allclose(model.decode([second], [9])[0], cut, atol=1e-5)
    for slot in (first, second):
        model.cache.free(slot)


def test_a_context_beyond_the_trained_one_is_a_warning(model, caplog, monkeypatch):
    compiled, tokenizer = model
    assert (
        compiled.trained_context == SIZES.context
        and model_loader._warn_of_long_context(compiled, tokenizer)
        and not caplog.text
    )
    monkeypatch.setattr(compiled, "trained_context", 128)
    model_loader._warn_of_long_context(compiled, tokenizer)
    assert "found 320 tokens, but the model was trained for 128" in caplog.text


def test_another_context_compiles_nothing(model, cache_folder, tmp_path, monkeypatch):
    model, _ = model
    monkeypatch.setenv("RELAX_HETERO_CACHE", str(cache_folder))
    compiled = []
    other, _ = loaded(tmp_path, context=100, progress=lambda stage, *_: compiled.append(stage))
    assert (other.executable.metadata.cache.state, compiled) == (HIT, [])
    assert (other.context, other.cache.pages["table_full"], model.cache.pages["table_full"]) == (100, (0, 6), (0, 15))
    np.testing.assert_array_equal(logits_alone(other, TOKENS[:100]), logits_alone(model, TOKENS[:100]))
    with pytest.raises(CacheError, match="expected at most"):
        other.cache.extend(other.cache.add(), 129)


@pytest.mark.parametrize("context", [64 * 24, 100])
def test_another_context_is_the_same_module_on_gpus(context, tmp_path, monkeypatch):
    modules, compiled = [], SimpleNamespace(metadata=SimpleNamespace(cache=None))
    monkeypatch.setattr("relax_hetero.driver.compile.compile", lambda mod, **_: modules.append(mod) or compiled)
    loaded_model = SimpleNamespace(context=0, trained_context=0)
    monkeypatch.setattr(model_loader, "CompiledModel", lambda *parts, **threads: loaded_model)
    for tokens in (4000, context):
        loaded(tmp_path, replace(SIZES, context=4096), vdevices=[{"kind": "cuda", "arch": "sm_90a"}], context=tokens)
    assert tvm_ffi.structural_equal(*modules)


@pytest.mark.parametrize("option", [{"context": 64}, {"slots": 2}, {"page_type": "int8"}, {"placement": "auto"}])
def test_options_of_a_model_that_is_compiled_already(tmp_path, option):
    with pytest.raises(rh.BuildError, match="does not hold a language model"):
        rh.llm.load(tmp_path, **option)
    (tmp_path / "model.json").touch()
    with pytest.raises(rh.BuildError, match="context, slots and other options apply only to files with weights"):
        rh.llm.load(tmp_path, **option)


def test_logits_of_all_tokens_of_a_prompt(model, by_layers):
    """As rows of one decode step they have the bits of single steps, also over a window and two devices."""
    for each, _ in (model, by_layers):
        slot, other = each.cache.add(), each.cache.add()
        for begin in range(0, len(TOKENS), each.prompt_chunk):
            tokens = TOKENS[begin : begin + each.prompt_chunk]
            rows = each.prefill_logits(slot, tokens).copy()
            singly = [each.decode([other], [token])[0].copy() for token in tokens]
            np.testing.assert_array_equal(rows, singly)
        assert each.prompt_chunk == 2 and each.cache.length(slot) == len(TOKENS)
        for used in (slot, other):
            each.cache.free(used)


def test_pages_come_back_from_a_call_that_failed(by_layers, monkeypatch):
    model, _ = by_layers
    slot = fill(model, TOKENS[:20])
    expected = logits_alone(model, TOKENS[:21])

    def fail():
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(model, "_prepared_calls", dict.fromkeys(model._prepared_calls, fail))
        with pytest.raises(RuntimeError, match="gone"):
            model.decode([slot], [1])
    model.cache.truncate(slot, 20)
    np.testing.assert_allclose(model.decode([slot], TOKENS[20:21])[0], expected, atol=1e-5)
    model.cache.free(slot)


def test_a_step_that_fails_changes_no_sequence(by_layers, monkeypatch):
    model, _ = by_layers
    slots = [fill(model, TOKENS[:count]) for count in (64, 5)]
    for owner, name in ((CompiledModel, "_call"), (CopiesToHost, "begin")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, MagicMock(side_effect=RuntimeError("no pinned memory")))
            with pytest.raises(RuntimeError, match="no pinned memory"):
                model.begin_decode(slots, [1, 1])
        assert [model.cache.length(slot) for slot in slots] == [64, 5]
    for slot in slots:
        model.cache.free(slot)


def test_a_decode_that_is_refused_changes_no_sequence(by_layers):
    model, _ = by_layers
    full, other = fill(model, (TOKENS * 3)[:320]), fill(model, TOKENS[:5])
    with pytest.raises(CacheError, match="at most 320 tokens"):
        model.decode([other, full], [1, 1])
    assert model.cache.length(other) == 5
    for slot in (full, other):
        model.cache.free(slot)


def test_steps_ahead_write_the_tokens_of_single_steps(varied, monkeypatch):
    """Texts that end at different steps, by stop tokens too, beside one that is cancelled, and a full cache."""
    compiled, tokenizer = varied
    assert compiled.has_decode_steps and not compiled.looks_ahead  # a CPU computes during the call
    monkeypatch.setattr(compiled, "looks_ahead", True)
    texts = []
    for has_steps in (False, True):
        monkeypatch.setattr(compiled, "has_decode_steps", has_steps)
        with Engine(compiled, tokenizer) as engine:
            params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (70, 1, 2, 33, 400)]
            requests = [engine.submit(TOKENS[: 60 - 9 * n], each) for n, each in enumerate(params)]
            cancelled = engine.submit(TOKENS[:7], SamplingParams(temperature=0, ignore_eos=True))
            next(iter(cancelled))
            cancelled.cancel()
            tokens = [[token for delta in request for token in delta.tokens] for request in requests]
            stop = SamplingParams(temperature=0, stop_token_ids=(tokens[0][40],), ignore_eos=True)
            stopped = engine.submit(TOKENS[:60], stop)
            tokens.append([token for delta in stopped for token in delta.tokens])
            texts.append((tokens, [request.finish_reason for request in (*requests, stopped)]))
        assert not any(used for used, _ in compiled.cache.pages.values())
    assert texts[0] == texts[1]
    assert len(set(texts[0][0][0])) > 20


def test_a_step_takes_the_tokens_of_the_step_before(varied):
    compiled, _ = varied
    slots = [fill(compiled, TOKENS[:n]) for n in (30, 50, 70)]
    check_steps_ahead(compiled, slots, 20)
    for slot in slots:
        compiled.cache.free(slot)


@pytest.fixture
def cuda(monkeypatch):
    """A driver in Python, whose work waits in its stream, and integers of GPUs in the host's memory."""
    cuda = FakeCuda()
    library, plain = FakeLibrary(cuda), compiled_model.empty
    for module in (cuda_copies, host_copies):
        monkeypatch.setattr(module, "cuda_library", lambda: library)
    monkeypatch.setattr(
        compiled_model, "empty", lambda shape, dtype, device: alias(plain(shape, dtype, tvm.cpu(0)), device)
    )
    return cuda


def test_a_step_of_two_gpus_makes_two_copies_for_each(cuda):
    """The fewest that bring integers and tokens, and none waits: the graphs of both GPUs are launched next."""
    shapes = {"tokens": (4,), "positions": (4,), "table_full": (4, 4), "sequences": (4,)}
    specs = [
        TensorSpec(f"{name}{'@1' * gpu}", shape, "int32", device=gpu)
        for name, shape in shapes.items()
        for gpu in (0, 1)
    ]
    inputs = compiled_model.IntegerInputs(specs, [tvm.cuda(0), tvm.cuda(1)], 16)
    results = [alias(tvm.runtime.tensor(np.full(4, 7 + gpu, "int32")), tvm.cuda(gpu)) for gpu in (0, 1)]
    events = set(cuda.events)
    for number in range(4):
        cuda.copies.clear()
        inputs.write_rows([0, 1, 2], [5, 6, 7])
        inputs.send({}, 0)
        inputs.copy_tokens(results, 3)
        nbytes = 48 + 64 * (number < 2)  # tables once for both turns
        assert cuda.copies == [("to the GPU", nbytes)] * 2 + [("on the GPU", 12)] * 2
        assert set(cuda.events) == events
    tokens = [np.from_dlpack(alias(tensor, tvm.cpu(0))) for tensor in inputs.tensors[:2]]
    cuda.cuStreamSynchronize(0)
    np.testing.assert_array_equal(tokens, [[7, 7, 7, 0], [8, 8, 8, 0]])


def test_a_call_takes_tokens_of_another_gpu_before_later_work_of_that_ends(cuda):
    """Stages would otherwise wait for the last stage of a step's last call. The tokens stay until they are copied."""
    specs = [TensorSpec(name, (4,), "int32", device=0) for name in ("tokens", "positions", "sequences")]
    inputs, streams = compiled_model.IntegerInputs(specs, [tvm.cuda(0)], 64), (501, 502)
    cuda.streams |= {stream: [] for stream in streams}
    result = alias(tvm.runtime.tensor(np.zeros(4, "int32")), tvm.cuda(1))
    values = np.from_dlpack(alias(result, tvm.cpu(0)))
    with tvm_ffi.use_raw_stream(tvm.cuda(0), streams[0]), tvm_ffi.use_raw_stream(tvm.cuda(1), streams[1]):
        for step in range(3):
            inputs.write_rows([0, 1, 2], [5, 6, 7])
            inputs.send({}, 0)
            cuda._push(streams[1], partial(values.fill, 7 + step))
            end, ended = cuda_copies.end_of_work(tvm.cuda(1)), []
            cuda._push(streams[1], partial(ended.append, "other call"))
            inputs.copy_tokens([result], 3, end)
            cuda._push(streams[1], partial(values.fill, -1))  # the memory has another use
            tokens = np.from_dlpack(alias(inputs.tensors[0], tvm.cpu(0)))
            cuda.cuStreamSynchronize(streams[step % 2])
            np.testing.assert_array_equal(tokens, [7 + step] * 3 + [0])
            assert ended == ["other call"] * (step % 2) and cuda.copies[-1] == ((101, 100), 12)
            cuda.cuStreamSynchronize(streams[1])


def test_steps_in_flight_on_a_gpu_read_their_own_integers(cuda):
    """Nothing waits, and the host writes on meanwhile."""
    shapes = {"tokens": (4,), "positions": (4,), "table_full": (200, 100), "sequences": (4,)}
    specs = [TensorSpec(name, shape, "int32", device=0) for name, shape in shapes.items()]
    inputs = compiled_model.IntegerInputs(specs, [tvm.cuda(0)], 64)
    seen, result = [], alias(tvm.runtime.tensor(np.zeros(4, "int32")), tvm.cuda(0))
    on_host = lambda tensor: np.from_dlpack(alias(tensor, tvm.cpu(0)))  # noqa: E731

    def step(arrays):
        seen.append([array.copy() for array in arrays])
        on_host(result)[:] = arrays[0] + 1

    counts, versions = (3, 3, 2, 4, 4, 1), (0, 1, 1, 1, 4, 4)
    for number, (count, version) in enumerate(zip(counts, versions, strict=True)):
        inputs.write_rows([2, 1, 0, 3][:count], [number] * count)
        inputs.arrays["tokens"][:count] = 10
        inputs.send({"table_full": np.full((200, 100), version)}, version)
        if number:
            inputs.copy_tokens([result], count)
        cuda._push(0, partial(step, [on_host(tensor) for tensor in inputs.tensors]))
    assert not seen
    cuda.cuStreamSynchronize(0)
    tokens, positions, tables, sequences = zip(*seen, strict=True)
    rows = np.arange(4) < np.array(counts)[:, None]
    np.testing.assert_array_equal(
        tokens, [[10, 10, 10, 0], [11, 11, 11, 0], [12, 12, 0, 0], [13, 13, 1, 1], [14, 14, 2, 2], [15, 0, 0, 0]]
    )
    np.testing.assert_array_equal(positions, np.arange(6)[:, None] * rows)
    np.testing.assert_array_equal(tables, [np.full((200, 100), version) for version in versions])
    np.testing.assert_array_equal(sequences, np.where(rows, [2, 1, 0, 3], -1))


def test_cpus_and_gpus_have_the_integers_of_the_last_step(cuda):
    """Also after a step that failed before its call; the tensors of a CPU stay the same."""
    shapes = {"tokens": (2,), "positions": (2,), "sequences": (2,), "table_full": (2, 2)}
    for devices in ([tvm.cpu(0), tvm.cuda(0)], [tvm.cuda(0), tvm.cpu(0)]):
        specs = [
            TensorSpec(f"{name}{'@1' * number}", shape, "int32", device=number)
            for number in (0, 1)
            for name, shape in shapes.items()
        ]
        inputs, on_cpu = compiled_model.IntegerInputs(specs, devices, 64), set()
        for step in range(5):
            inputs.write_rows([1], [step])
            inputs.arrays["tokens"][0] = 10 + step
            inputs.send({"table_full": np.full((2, 2), step // 2)}, step // 2)
            on_cpu |= {tensor.data_ptr() for tensor in inputs.tensors if tensor.device.dlpack_device_type() == 1}
            if step == 2:
                continue
            cuda.cuStreamSynchronize(0)
            expected = [[10 + step, 0], [step, 0], [1, -1], np.full((2, 2), step // 2)] * 2
            for tensor, array in zip(inputs.tensors, expected, strict=True):
                np.testing.assert_array_equal(np.from_dlpack(alias(tensor, tvm.cpu(0))), array)
        assert len(on_cpu) == len(shapes)


def test_logits_that_are_not_finite_end_the_request(model, monkeypatch):
    compiled, tokenizer = model
    written = compiled._inputs

    def poison(name, tokens, positions, slots, last):
        """NaN in the keys of a sequence from position 64 on."""
        if name.startswith("decode") and max(positions) == 70:
            pages = compiled.cache.take()
            for page in pages:
                np.from_dlpack(page)[compiled.cache.tables["table_full"][slots[0], 1]] = np.nan
            compiled.cache.release(pages)
        return written(name, tokens, positions, slots, last)

    monkeypatch.setattr(compiled, "_inputs", poison)
    with Engine(compiled, tokenizer, prompt_lookup=False) as engine:
        request = engine.submit(TOKENS[:60], SamplingParams(temperature=0, ignore_eos=True))
        with pytest.raises(rh.HeteroError, match="logits: found nan as the largest of 320"):
            request.result(60)
    assert request.usage.completion_tokens == 11


@pytest.mark.slow  # beside those of both devices' logits, in test_from_gguf.py
def test_two_devices_write_the_tokens_of_one(model, by_layers):
    sampling = [
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0.7, top_k=20, seed=3, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=1, top_p=0.8, min_p=0.01, seed=4, max_tokens=30, repetition_penalty=1.2),
    ]
    texts = []
    for each in (model, by_layers):
        with Engine(*each) as engine:
            requests = [engine.submit(TOKENS[: 60 + n], params) for n, params in enumerate(sampling)]
            texts.append([[token for delta in request for token in delta.tokens] for request in requests])
    assert texts[0] == texts[1]
    # A step is one command buffer on each device, and no cache goes from one to the other.
    about = by_layers[0].executable.metadata
    regions = [region for region in about.regions if region.function == "decode_2"]
    assert [region.device for region in regions] == [0, 1], [region.ended_by for region in regions]
    assert not [call for call in about.single_calls if call.function == "decode_2"]
    moved = [entry["variable"] for entry in about.placement if entry["kind"] == "transfer"]
    assert "blk.0.ffn_sum_llvm_1" in moved and not any("pages" in name for name in moved)


def test_a_draft_model_beside_two_devices(by_layers, model, monkeypatch):
    """A target over two devices writes its own texts, while most of its tokens come from a model on one device."""
    target, tokenizer = by_layers
    sampling = [
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=3, max_tokens=60, ignore_eos=True),
    ]
    with Engine(target, tokenizer, prompt_lookup=False) as engine:
        expected = [engine.generate([TOKENS[:60]], each)[0].tokens for each in sampling]
    monkeypatch.setattr(StepTimes, "seconds", lambda self, rows: 1 + 0.02 * rows)
    monkeypatch.setattr(DraftModel, "seconds", lambda *_: (0.05, 0.0))
    with Engine(target, tokenizer, draft=model[0], prompt_lookup=False) as engine:
        texts = [engine.generate([TOKENS[:60]], each)[0].tokens for each in sampling]
        statistics = engine.statistics()
    assert texts == expected
    assert statistics.accepted > 0.9 * statistics.drafted > 40
    devices = [{region.device for region in each.executable.metadata.regions} for each in (target, model[0])]
    assert devices == [{0, 1}, {0}]


@pytest.mark.slow
def test_a_draft_model_gets_the_sizes_of_its_target(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", Sizes(layers=1, width=128, feed_forward=64, heads=2, size=32), "Q8_0")
    model, _ = rh.llm.load(path, draft=path, draft_vdevices=TWO[1:], batches=(2,), chunks=(32,), context=100)
    assert (model.draft.context, model.draft.slots, model.draft.decode_rows) == (100, 2, 2)
    assert "x86-64-v3" in str(model.draft.executable.devices[0].target)


def test_a_draft_model_has_the_same_tokens(varied, tmp_path):
    other = SimpleNamespace(piece=lambda token: b"?" if token == 300 else varied[1].piece(token))
    with pytest.raises(BuildError, match=r"draft: its token 300 is b'\?', expected b'.*' as in the model"):
        model_loader._check_draft_tokens(varied[1], (varied[0], other))
    path = write_gguf(tmp_path / "model.gguf", SIZES, "Q8_0")  # before anything is compiled
    with pytest.raises(BuildError, match="draft: its token 300"):
        rh.llm.load(path, draft=(varied[0], other), progress=lambda *_: pytest.fail("compiles"))
    with pytest.raises(BuildError, match="found draft_vdevices or draft_placement, expected them with draft="):
        rh.llm.load(path, draft_vdevices=["llvm"])
    with pytest.raises(BuildError, match="draft: found CompiledModel; expected the path of a smaller model, or the"):
        rh.llm.load(path, draft=varied[0])


def test_functions_that_do_not_fit_yet(varied, monkeypatch):
    """Memory of the first functions is free before others are loaded; where these fail, each call tries again."""
    executable = varied[0].executable
    rest = BackgroundTask(lambda _: executable)
    rest.result()
    model = CompiledModel(executable, varied[0].description, rest)
    model._mask = model.machine["decode_2"]  # as on GPUs
    machine = weakref.ref(model.machine)

    def fail(_, **threads):
        assert machine() is None
        raise HeteroError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(compiled_model, "VirtualMachine", fail)
        for _ in range(2):
            with pytest.raises(HeteroError, match="out of memory"):
                model.prefill(model.cache.add(), TOKENS[:5])
    expected = varied[0].prefill(varied[0].cache.add(), TOKENS[:5])
    np.testing.assert_array_equal(model.prefill(model.cache.add(), TOKENS[:5]), expected)


def test_the_bytes_of_a_token(by_layers, tmp_path):
    model, _ = by_layers
    cost = model.token_cost(cached=99)
    file = read_gguf(write_gguf(tmp_path / "model.gguf", SIZES, "Q8_0"))
    sizes = {name: tensor.data.nbytes for name, tensor in file.tensors.items()}
    of = {(part.part, part.device): part for part in cost.parts}
    visible = (80, 100)  # the first layer has a window
    for layer, device in enumerate(("llvm:0", "llvm:1")):
        feed_forward = sum(size for name, size in sizes.items() if name.startswith(f"blk.{layer}.ffn"))
        # Blocks lie in memory as in the file, or with a scale of float32.
        assert feed_forward <= of["feed-forward", device].weights <= 1.2 * feed_forward
        assert of["attention", device].cache == 2 * visible[layer] * 2 * SIZES.kv_heads * SIZES.size * 4
    assert of["embedding", "llvm:0"].weights < 3 * 2 * sizes["token_embd.weight"] / SIZES.vocabulary
    assert of["logits", "llvm:1"].weights >= sizes["token_embd.weight"]
    assert 2 * 4 * SIZES.width <= of["transfers", "llvm:1"].transferred < 5000
    assert cost.of_device("llvm:0").weights == sum(p.weights for p in cost.parts if p.device == "llvm:0")
    assert cost.buffers == {"llvm:0": ("decode_2_commands",), "llvm:1": ("decode_2_commands_1",)} and not cost.outside
    assert "1 command buffer on llvm:0 (decode_2_commands) and 1 command buffer on llvm:1" in str(cost)


def test_the_times_of_a_token(by_layers):
    model, _ = by_layers
    cost = model.token_cost(cached=40, profile=True, rounds=2)
    assert all(part.seconds > 0 for part in cost.parts)
    assert cost.step.seconds > 0 and 0 <= cost.step.outside <= 1
    assert "Measured: a step takes" in str(cost)
    assert json.loads(json.dumps(cost.to_json()))["step"]["outside"] == cost.step.outside


def test_a_trace_names_the_command_buffer_of_each_device(by_layers, tmp_path):
    model, _ = by_layers
    slot = model.cache.add()
    with model.machine.trace() as trace:
        model.decode([slot], [1])
    model.cache.free(slot)
    trace.save(tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    assert text.count('"decode_2_commands"') == text.count('"decode_2_commands_1"') == 1


def test_a_report_has_the_times_of_a_step_and_of_a_prompt(model, monkeypatch):
    monkeypatch.setattr("relax_hetero.report.executable_report.peaks_of", lambda devices: {})
    model, _ = model
    profiles = model.profile(cached=40, rounds=2)
    assert [profile.function for profile in profiles] == ["decode_2", "prefill_32"]
    data = report_of(model.executable, profile=profiles, token=model.token_cost(cached=40, profile=True, rounds=2))
    assert data["token"]["step"]["seconds"] > 0
    assert (data["profile"]["function"], data["more_profiles"][0]["function"]) == ("decode_2", "prefill_32")
    for group in data["groups"]:
        assert group["nodes"] and group["seconds"] > 0 and group["calls"] == 1, group["kernel"]
    for function in ("decode_2", "prefill_32"):
        share = sum(group["share"] for group in data["groups"] if group["function"] == function)
        assert 0 < share <= 1.01


def test_a_saved_model_is_loaded_with_its_own_files_only(model, tmp_path):
    model, _ = model
    rh.llm.save(model, write_gguf(tmp_path / "model.gguf", SIZES, "Q8_0"), tmp_path / "saved")
    again, _ = rh.llm.load(tmp_path / "saved")
    np.testing.assert_array_equal(logits_alone(again, TOKENS[:40]), logits_alone(model, TOKENS[:40]))
    for name in ("tokenizer.gguf", "model.so"):
        with open(tmp_path / "saved" / name, "r+b") as file:
            file.seek(-1, 2)
            last = file.read(1)
            file.seek(-1, 2)
            file.write(bytes([last[0] ^ 1]))
        with pytest.raises(BuildError, match=f"{name}: found another file than"):
            rh.llm.load(tmp_path / "saved")


def test_logits_of_several_gpus_are_joined_on_the_host(monkeypatch):
    """With a driver in Python: rows of each GPU's part, beside each other, and only those asked for."""
    cuda = FakeCuda()
    library = FakeLibrary(cuda)
    for module in (cuda_copies, host_copies):
        monkeypatch.setattr(module, "cuda_library", lambda: library)
    parts = np.random.default_rng(0).standard_normal((2, 3, 8)).astype("float32")
    logits = [alias(tvm.runtime.tensor(part), tvm.cuda(gpu)) for gpu, part in enumerate(parts)]
    joined = JoinedColumns(logits)
    assert joined.array.shape == (3, 16)
    joined.array[:] = 7
    joined.copy(logits, 2)
    np.testing.assert_array_equal(joined.array, [*np.concatenate([part[:2] for part in parts], axis=1), [7] * 16])
    alone = JoinedColumns(logits[:1])
    alone.copy(logits[:1], 3)
    np.testing.assert_array_equal(alone.array, parts[0])
    assert cuda.copies == [("to the host", 2 * 32), ("to the host", 2 * 32), ("to the host", 3 * 32)]
