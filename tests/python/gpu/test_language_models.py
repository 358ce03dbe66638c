"""Language models of GGUF files on a GPU, and over a CPU and a GPU, against the float64 reference."""

import numpy as np
import pytest

import relax_hetero as rh
from llm import architecture_models as architectures
from llm.gguf_files import MODELS, write_gguf
from llm.reference_model import ReferenceModel
from llm.run_gguf import check_steps_ahead, run
from llm.test_encoder import file_of
from models.running import needs_gpu
from relax_hetero.encoding.block_formats import FILE_FORMATS
from relax_hetero.llm.draft_model import DraftModel
from relax_hetero.llm.speculation import StepTimes
from relax_hetero.vm.device.tensors import is_host

pytestmark = [pytest.mark.gpu, needs_gpu]

TOKENS = np.random.default_rng(1).integers(0, 320, 83)


def check(path, actual):
    """Keys and values are rounded to float16, products perhaps to 10 bits of fraction."""
    expected = ReferenceModel(path).logits(TOKENS)
    assert np.abs(actual - expected).max() < 0.02 * np.abs(expected).max()


@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu(name, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS[name], {"*attn*": "F32", "*": "Q8_0"})
    # Rounded activations choose other experts where these are nearly as good as each other.
    activations = "float32" if MODELS[name].experts else None
    check(path, run(path, TOKENS, 13, ["cuda"], page_type="float16", activations=activations))


# GPUs take compressed keys of multiples of 64 elements; this model has 32.
@pytest.mark.parametrize("name", [name for name in architectures.MODELS if name != "minicpm3"])
def test_architectures_on_a_gpu(name, tmp_path):
    """Against logits of `transformers`; models that magnify rounding have a tolerance of their own."""
    model = architectures.MODELS[name]
    path = file_of(tmp_path, name, architectures.MODELS)
    expected, options = architectures.recorded(name)[1], {"page_type": "float16", "activations": "float32"}
    actual = run(path, architectures.TOKENS, 6, ["cuda"], **options)[list(architectures.ROWS)]
    assert np.abs(actual - expected).max() < 1000 * model.tolerance * np.abs(expected).max()


@pytest.mark.parametrize("name", architectures.ENCODERS)
def test_encoders_on_a_gpu(name, tmp_path):
    encoder = rh.llm.Encoder(file_of(tmp_path, name), ["cuda"], lengths=(70, 32))
    tokens, expected = architectures.TOKENS, architectures.recorded(name)[1]
    actual = np.stack([encoder.embed_tokens(tokens[:length]) for length in architectures.LENGTHS])
    assert np.abs(actual - expected).max() < 0.02 * np.abs(expected).max()


@pytest.mark.parametrize(
    "kind",
    [
        "F16",
        *(
            form.name.upper()
            for form in FILE_FORMATS.values()
            if not form.is_plain and form.name not in ("q1_0", "q2_0")
        ),
    ],
)
def test_blocks_on_a_gpu(kind, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS["llama-tied"], {"*": kind})
    check(path, run(path, TOKENS, 13, ["cuda"], page_type="float16"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("qwen3moe", "Q4_K"), ("qwen3moe", "BF16"), ("qwen2moe", "Q6_K"), ("olmoe", "Q5_1"), ("gpt-oss", "MXFP4"),
     ("qwen3moe", "Q2_K"), ("qwen3moe", "IQ4_XS"), ("qwen2moe", "IQ2_XXS"), ("olmoe", "IQ3_S"), ("olmoe", "IQ1_M")],
)  # fmt: skip
def test_experts_of_formats_on_a_gpu(name, kind, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS[name], {"*exps*": kind, "*": "Q8_0"})
    check(path, run(path, TOKENS, 13, ["cuda"], page_type="float16", activations="float32"))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q5_1", "Q6_K", "Q8_0", "MXFP4", "BF16", "Q3_K", "IQ4_XS"])
@pytest.mark.parametrize("pattern", ["blk.*.ffn_*_exps*", "blk.*.ffn_*", "blk.*.ffn_*_exps[0-4]"])
def test_experts_that_are_copied_for_chunks(kind, pattern, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS["qwen3moe"], {"*exps*": kind, "*": "Q8_0"})
    rules, options = {pattern: "llvm", "*": "cuda"}, {"page_type": "float16", "activations": "float32"}
    check(path, run(path, TOKENS, 13, ["llvm", "cuda"], rules, stream_experts=16, **options))


@pytest.mark.parametrize(
    "placement",
    [{"blk.0.*": "cuda"}, {"blk.*.ffn*": "cuda"}, {"blk.*.attn*": "cuda"}, {"blk.1.*": "cuda", "output*": "cuda"}],
    ids=["first", "feed-forward", "attention", "last"],
)
def test_over_a_cpu_and_a_gpu(placement, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS["llama-tied"], {"*": "Q8_0"})
    check(path, run(path, TOKENS, 13, ["llvm", "cuda"], placement, page_type="float16"))


SPLIT = {"blk.*.ffn_*_exps[0,2-4]": "cuda", "blk.*.ffn_*_exps": "llvm", "*": "cuda"}


@pytest.mark.parametrize(("name", "kind"), [("qwen3moe", "Q4_K"), ("gpt-oss", "MXFP4")])
def test_experts_of_a_layer_over_a_cpu_and_a_gpu(name, kind, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS[name], {"*exps*": kind, "*": "Q8_0"})
    options = {"page_type": "float16", "activations": "float32"}
    check(path, run(path, TOKENS, 13, ["llvm", "cuda"], SPLIT, **options))


def test_experts_are_counted_on_a_gpu(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS["qwen3moe"], "Q8_0")
    options = {"batches": (2,), "chunks": (32,), "context": 128, "count_experts": True}
    model, _ = rh.llm.load(path, ["llvm", "cuda"], SPLIT, **options)
    slot = model.cache.add()
    model.prefill(slot, np.arange(3, 30, dtype="int32"))  # 27 of 32 rows
    for token in range(40):
        model.decode([slot], [token])  # one of two rows
    assert {sum(counts) for counts in model.expert_counts.read().values()} == {(27 + 40) * 3}


def test_steps_ahead_on_a_gpu(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS["llama"], "Q8_0")
    model, _ = rh.llm.load(path, ["cuda"], batches=(4,), chunks=(64,), context=256)
    slots = [model.cache.add() for _ in range(3)]
    for slot in slots:
        model.prefill(slot, np.arange(3, 40 + slot, dtype="int32"))
    check_steps_ahead(model, slots, 150)


def test_weights_of_a_gpu_leave_the_host(tmp_path, monkeypatch):
    """The executable keeps the GPU's copies alone, and writes them to files."""
    monkeypatch.setenv("RELAX_HETERO_CACHE", "off")  # executables in files have no copies of their own
    path = write_gguf(tmp_path / "model.gguf", MODELS["qwen3moe"], "Q8_0")
    options = {"batches": (1,), "chunks": (32,), "context": 128}
    model, _ = rh.llm.load(path, ["llvm", "cuda"], {"blk.0.*": "llvm", "*": "cuda"}, **options)
    specs, names = model.executable.metadata.constants, [device.kind for device in model.executable.devices]
    weights = [
        (names[spec.device], is_host(tensor.device))
        for spec, tensor in zip(specs, model.executable.constants, strict=True)
        if not spec.is_placeholder and spec.device >= 0
    ]
    assert set(weights) == {("llvm", True), ("cuda", False)}
    rh.llm.save(model, path, tmp_path / "saved")
    again, _ = rh.llm.load(tmp_path / "saved")
    logits = [each.prefill(each.cache.add(), TOKENS[:20]).copy() for each in (model, again)]
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize("placement", [None, {"blk.0.*": "llvm", "*": "cuda"}], ids=["a GPU", "a CPU and a GPU"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek2"])
def test_rows_of_one_sequence_have_the_bits_of_single_steps(name, placement, tmp_path):
    """All calls have four rows, so that every sum has its order; rows cross the border of a page."""
    path = write_gguf(tmp_path / "model.gguf", MODELS[name], "Q8_0")
    options = {"batches": (4,), "chunks": (64,), "context": 256, "verify_drafts": True}
    model, _ = rh.llm.load(path, ["llvm", "cuda"] if placement else ["cuda"], placement, **options)
    assert model.decode_rows == 4
    first, second = (model.cache.add() for _ in range(2))
    model.prefill(first, TOKENS[:62].astype("int32"))
    model.prefill(second, TOKENS[:30].astype("int32"))
    single = [model.decode([first], [int(token)])[0].copy() for token in TOKENS[62:65]]
    other = model.decode([second], [5])[0].copy()
    for slot, length in ((first, 62), (second, 30)):
        model.cache.truncate(slot, length)
    rows = model.decode([first, first, first, second], [*map(int, TOKENS[62:65]), 5])
    np.testing.assert_array_equal(rows, [*single, other])
    model.cache.truncate(first, 62)
    step = model.begin_decode([first] * 3, [int(token) for token in TOKENS[62:65]])
    assert step.tokens() == [int(row.argmax()) for row in single]


@pytest.mark.parametrize("draft_device", ["cuda", "llvm"])
def test_drafts_on_a_gpu(draft_device, tmp_path, monkeypatch):
    """Texts of several requests at once are those without drafts; those that look ahead get drafts, too."""
    monkeypatch.setattr(StepTimes, "seconds", lambda self, rows: 1 + 0.02 * rows)
    monkeypatch.setattr(DraftModel, "seconds", lambda self, text, texts, length: (0.05 * length, 0.0))
    path = write_gguf(tmp_path / "model.gguf", MODELS["llama"], "Q8_0")
    options = {"batches": (8,), "chunks": (64,), "context": 256, "slots": 4}
    model, tokenizer = rh.llm.load(path, ["cuda"], draft=path, draft_vdevices=[draft_device], **options)
    params = [
        rh.llm.SamplingParams(temperature=temperature, seed=1, max_tokens=80, ignore_eos=True)
        for temperature in (0, 0, 0.8)
    ]
    texts, accepted = [], []
    for draft, lookup in ((None, False), (model.draft, False), (None, True)):
        model.draft = draft
        with rh.llm.Engine(model, tokenizer, prompt_lookup=lookup) as engine:
            alone = engine.generate([[*TOKENS[:20].tolist()] * 3], params[0])
            together = engine.generate([TOKENS[: 40 + n].tolist() for n in range(3)], params)
            texts.append([each.tokens for each in (*alone, *together)])
            accepted.append(engine.statistics().accepted)
    assert texts[0] == texts[1] == texts[2]
    assert accepted[0] == 0 and accepted[1] > 50, accepted


def test_masks_are_applied_on_a_gpu(tmp_path, monkeypatch):
    """Greedy texts with forms beside free ones: those of masks on the host, without a copy of logits."""
    pytest.importorskip("llguidance")
    path = write_gguf(tmp_path / "model.gguf", MODELS["llama"], "Q8_0")
    model, tokenizer = rh.llm.load(path, ["cuda"], batches=(2, 4), chunks=(64,), context=256)
    forms = [None, rh.llm.StructuredOutputs(regex="[a-z ]{20,40}"), rh.llm.StructuredOutputs(choice=["yes", "no"])]
    params = [
        rh.llm.SamplingParams(temperature=0, max_tokens=30, min_tokens=length, structured_outputs=form)
        for form in forms
        for length in (0, 9)
    ]
    texts, copied = [], model._to_host
    for masks in (False, True):
        copies = []
        monkeypatch.setattr(model, "_to_host", lambda name, *rest: copies.append(name) or copied(name, *rest))  # noqa: B023
        monkeypatch.setattr(model, "masks_tokens", masks)
        with rh.llm.Engine(model, tokenizer) as engine:
            texts.append([each.tokens for each in engine.generate([TOKENS[:40].tolist()] * len(params), params)])
        assert any(name.startswith("decode") for name in copies) != masks
    assert texts[0] == texts[1]
