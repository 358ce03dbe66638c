"""Quantized folders: the numbers of AWQ, GPTQ, compressed-tensors, FP8 and MXFP4, packed here as their authors do."""

import json

import numpy as np
import pytest
from ml_dtypes import bfloat16, float8_e4m3fn

import relax_hetero as rh
from llm.hub_files import write_folder, write_safetensors
from llm.run_gguf import run
from relax_hetero.encoding.block_formats import FILE_FORMATS, dequantize_rows
from relax_hetero.errors import FrontendError
from relax_hetero.frontend.gguf.place_layers import layouts_of, resident_bytes
from relax_hetero.frontend.gguf.weights import format_of, split_integer_rows
from relax_hetero.frontend.language_model_files import read_language_model
from relax_hetero.target.make_vdevice import parse_vdevices

GENERATOR = np.random.default_rng(3)
FLOAT4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
TOKENS = np.random.default_rng(1).integers(0, 300, 40)


def pack(numbers, bits, axis, order=None):
    """Neighbours along an axis in words of 32 bits; `order` has the neighbour in each place of a word."""
    count = 32 // bits
    order = range(count) if order is None else order
    numbers = np.moveaxis(numbers, axis, -1)
    numbers = np.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, -numbers.shape[-1] % count)])
    numbers = numbers.reshape(*numbers.shape[:-1], -1, count).astype("uint32")
    words = np.zeros(numbers.shape[:-1], "uint32")
    for place, neighbour in enumerate(order):
        words |= numbers[..., neighbour] << np.uint32(bits * place)
    return np.moveaxis(words, -1, axis).view("int32")


def integers(matrix, bits, group, symmetric, dtype="float16"):
    """Integers, (rows, depth), scales and zero points of groups, (rows, groups), and the numbers that they mean."""
    rows, depth = matrix.shape
    groups = matrix.reshape(rows, -1, group)
    spread = np.abs(groups).max(-1) / ((1 << bits) / 2 - 1)
    scales = spread.astype(dtype)
    shape = scales.shape
    middle = 1 << (bits - 1)
    zeros = np.full(shape, middle) if symmetric else GENERATOR.integers(middle - 2, middle + 2, shape)
    wide = scales.astype("float64")[..., None]
    quants = np.clip(np.rint(groups / wide) + zeros[..., None], 0, (1 << bits) - 1)
    return quants.reshape(rows, depth), scales, zeros, ((quants - zeros[..., None]) * wide).reshape(rows, depth)


def awq(matrix, symmetric=False):
    quants, scales, zeros, numbers = integers(matrix, 4, 64, symmetric)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": pack(quants.T, 4, 1, order), "qzeros": pack(zeros.T, 4, 1, order), "scales": scales.T}
    return parts, numbers, "INT4_64" if symmetric else "INT4_64_MINIMUM"


def gptq(matrix, bits=4, symmetric=True, version=1, order=None):
    group = 32
    columns = np.arange(matrix.shape[1]) if order is None else order
    quants, scales, zeros, numbers = integers(matrix[:, columns], bits, group, symmetric)
    back = np.argsort(columns)
    parts = {
        "qweight": pack(quants[:, back].T, bits, 0),
        "qzeros": pack(zeros.T - (version == 1), bits, 1),
        "scales": scales.T,
        "g_idx": (np.arange(matrix.shape[1]) // group)[back].astype("int32"),
    }
    kind = f"INT{max(bits, 4)}_{group}{'' if symmetric and bits > 2 else '_MINIMUM'}"
    return parts, numbers[:, back], kind if order is None else "F16"


def packed(matrix, bits=4, symmetric=True, group=128):
    quants, scales, zeros, numbers = integers(matrix, bits, group, symmetric, bfloat16)
    parts = {"weight_packed": pack(quants, bits, 1), "weight_scale": scales}
    parts["weight_shape"] = np.array(matrix.shape, "int64")
    if not symmetric:
        parts["weight_zero_point"] = pack(zeros, bits, 0)
    block = min(group, 128)
    return parts, numbers, f"INT{bits}_{block}{'' if symmetric else '_MINIMUM'}"


def int8(matrix):
    scales = (np.abs(matrix).max(1, keepdims=True) / 127).astype("float32")
    quants = np.rint(matrix / scales)
    return {"weight": quants.astype("int8"), "weight_scale": scales}, quants * scales.astype("float64"), "INT8_128"


def fp8(matrix, blocks):
    rows, depth = matrix.shape
    height, width = (rows if not blocks[0] else blocks[0]), (depth if not blocks[1] else blocks[1])
    scales = GENERATOR.uniform(0.001, 0.004, (-(-rows // height), -(-depth // width))).astype("float32")
    wide = scales.repeat(height, 0)[:rows].repeat(width, 1)[:, :depth].astype("float64")
    data = (matrix / wide).astype(float8_e4m3fn)
    name = "weight_scale_inv" if blocks == (128, 128) else "weight_scale"
    scales = scales.reshape(()) if blocks == (0, 0) else scales
    return {"weight": data, name: scales}, data.astype("float64") * wide, "BF16"


def nvfp4(matrix):
    rows, depth = matrix.shape
    scales = GENERATOR.uniform(10, 20, (rows, depth // 16)).astype(float8_e4m3fn)
    codes = GENERATOR.integers(0, 16, (rows, depth // 2, 2))
    numbers = np.array(FLOAT4)[codes].reshape(rows, -1, 16) * (scales.astype("float64") / 500)[..., None]
    parts = {"weight_packed": (codes[..., 0] | codes[..., 1] << 4).astype("uint8"), "weight_scale": scales}
    return parts | {"weight_global_scale": np.array([500], "float32")}, numbers.reshape(rows, depth), "NVFP4"


def nvfp4_of_modelopt(matrix):
    parts, numbers, kind = nvfp4(matrix)
    renamed = {"weight": parts["weight_packed"], "weight_scale": parts["weight_scale"]}
    renamed |= {"weight_scale_2": np.float32(1 / 500), "input_scale": np.float32(0.1)}
    return renamed, numbers, kind


REORDERED = np.random.default_rng(0).permutation
CASES = {
    "awq": ({"quant_method": "awq", "bits": 4}, awq),
    "awq-symmetric": ({"quant_method": "awq", "bits": 4}, lambda matrix: awq(matrix, True)),
    "gptq": ({"quant_method": "gptq", "bits": 4}, gptq),
    "gptq-zeros": ({"quant_method": "gptq", "bits": 4}, lambda matrix: gptq(matrix, symmetric=False)),
    "gptq-8": ({"quant_method": "gptq", "bits": 8}, lambda matrix: gptq(matrix, 8)),
    "gptq-2": ({"quant_method": "gptq", "bits": 2}, lambda matrix: gptq(matrix, 2)),
    "gptq-v2": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
        lambda matrix: gptq(matrix, symmetric=False, version=2),
    ),
    "gptq-order": (
        {"quant_method": "gptq", "bits": 4, "desc_act": True},
        lambda matrix: gptq(matrix, order=REORDERED(matrix.shape[1])),
    ),
    "packed": ({"quant_method": "compressed-tensors"}, packed),
    "packed-zeros": ({"quant_method": "compressed-tensors"}, lambda matrix: packed(matrix, symmetric=False)),
    "packed-8": ({"quant_method": "compressed-tensors"}, lambda matrix: packed(matrix, 8)),
    "packed-rows": ({"quant_method": "compressed-tensors"}, lambda matrix: packed(matrix, group=matrix.shape[1])),
    "int8": ({"quant_method": "compressed-tensors"}, int8),
    "nvfp4": ({"quant_method": "compressed-tensors"}, nvfp4),
    "nvfp4-modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4_of_modelopt),
    "fp8-blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, lambda matrix: fp8(matrix, (128, 128))),
    "fp8-rows": ({"quant_method": "fbgemm_fp8"}, lambda matrix: fp8(matrix, (1, 0))),
    "fp8-matrix": ({"quant_method": "compressed-tensors"}, lambda matrix: fp8(matrix, (0, 0))),
}


def quantized_folder(case, folder, name="llama"):
    """A folder whose layers' matrices are quantized, one whose are the numbers that they mean, and types by names."""
    config, quantize = CASES[case]
    kinds, plain = {}, {}

    def convert(arrays):
        converted = {}
        for key, array in arrays.items():
            if not key.endswith("_proj.weight"):
                converted[key] = plain[key] = array
                continue
            parts, numbers, kinds[key] = quantize(array)
            plain[key] = numbers.astype("float32")
            module = key.removesuffix("weight")
            converted |= {f"{module}{part}": np.asarray(each) for part, each in parts.items()}
        return converted

    _, target = write_folder(name, folder, convert, quantization_config=config)
    reference = folder / "plain"
    reference.mkdir()
    values = json.loads((target / "config.json").read_text())
    del values["quantization_config"]
    (reference / "config.json").write_text(json.dumps(values))
    write_safetensors(reference / "model.safetensors", plain)
    return target, reference, kinds


def numbers_of(tensor):
    """Numbers of a tensor of any type."""
    form, depth = format_of(tensor.type), tensor.shape[-1]
    if tensor.type in ("F32", "F16"):
        return tensor.data.astype("float64")
    data = np.ascontiguousarray(tensor.data).view("uint8").reshape(-1, tensor.data.shape[-1])
    if form.name in FILE_FORMATS:
        return dequantize_rows(data, form, depth).reshape(tensor.shape)
    quants, scales, *zeros = split_integer_rows(data, form, depth)
    quants = np.stack([quants & 15, quants >> 4], -1).reshape(len(quants), -1) if form.bits == 4 else quants
    points = np.repeat(zeros[0], form.block, 1) if zeros else 1 << (form.bits - 1)
    return ((quants.astype("float64") - points) * np.repeat(scales, form.block, 1)).reshape(tensor.shape)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_numbers_of_matrices(case, tmp_path):
    folder, reference, kinds = quantized_folder(case, tmp_path)
    found, expected = (read_language_model(each).tensors for each in (folder, reference))
    scales = {name: found.pop(name) for name in list(found) if name.endswith(".scale")}
    assert found.keys() == expected.keys() and set(kinds.values()) != {"F32"}
    assert {tensor.type for tensor in found.values()} == {"F32", *kinds.values()}
    for key, tensor in expected.items():
        assert found[key].data.nbytes == found[key].nbytes
        tolerance = {"BF16": 2**-8, "F16": 2**-10}.get(found[key].type, 1e-6)
        scale = scales.pop(key.replace(".weight", ".scale")).data if found[key].type == "NVFP4" else 1
        np.testing.assert_allclose(numbers_of(found[key]) * scale, tensor.data, rtol=tolerance, atol=1e-7, err_msg=key)
    assert not scales


@pytest.mark.slow  # two models are compiled for each; test_numbers_of_matrices compares all that is read
@pytest.mark.parametrize("case", ["awq", "gptq", "packed-8", "nvfp4", "fp8-blocks"])
def test_logits(case, tmp_path):
    folder, reference, _ = quantized_folder(case, tmp_path)
    expected = run(reference, TOKENS, 3)
    np.testing.assert_allclose(run(folder, TOKENS, 3), expected, atol=4e-2 if case == "fp8-blocks" else 2e-3)


def experts_folder(case, tmp_path, means):
    """A folder with experts one by one, whose quantized rows are stacked; `means` gets their numbers."""
    config, quantize = CASES[case]

    def convert(arrays):
        converted = {key: array for key, array in arrays.items() if ".experts." not in key}
        for key in arrays.keys() - converted.keys():
            layer = key.partition(".experts.")[0]
            gates = {"w1": arrays[key][:, :256], "w3": arrays[key][:, 256:]}
            for part, matrices in (gates if key.endswith("gate_up_proj") else {"w2": arrays[key]}).items():
                for expert, matrix in enumerate(matrices):
                    parts, numbers, _ = quantize(matrix)
                    name = f"{layer.replace('mlp', 'block_sparse_moe')}.experts.{expert}.{part}"
                    converted |= {f"{name}.{end}": np.ascontiguousarray(each) for end, each in parts.items()}
                    means[int(layer.split(".")[2]), part, expert] = numbers
        return converted

    return write_folder("mixtral", tmp_path, convert, quantization_config=config)[1]


@pytest.mark.parametrize("case", ["awq", "nvfp4-modelopt"])
def test_experts_keep_their_bits(case, tmp_path):
    means = {}
    tensors = read_language_model(experts_folder(case, tmp_path, means)).tensors
    for part, name in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
        tensor = tensors[f"blk.1.ffn_{name}_exps.weight"]
        assert tensor.type == ("INT4_64_MINIMUM" if case == "awq" else "NVFP4") and tensor.shape[0] == 4
        expected = np.stack([means[1, part, expert] for expert in range(4)])
        scale = tensors[f"blk.1.ffn_{name}_exps.scale"].data[:, None, None] if case != "awq" else 1
        np.testing.assert_allclose(numbers_of(tensor) * scale, expected, rtol=1e-6)


@pytest.mark.slow  # tensors are compared above, and tests of GGUF files have kernels of their formats
@pytest.mark.parametrize("case", ["awq", "nvfp4-modelopt"])
def test_experts_run(case, tmp_path):
    assert np.isfinite(run(experts_folder(case, tmp_path, {}), TOKENS, 3)).all()


def test_mxfp4_of_gpt_oss(tmp_path):
    means = {}

    def convert(arrays):
        converted = dict(arrays)
        for key in [key for key in arrays if key.endswith(("gate_up_proj", "down_proj")) and ".experts." in key]:
            experts, depth, rows = converted.pop(key).shape
            codes = GENERATOR.integers(0, 16, (experts, rows, depth // 32, 16, 2))
            scales = GENERATOR.integers(120, 126, (experts, rows, depth // 32)).astype("uint8")
            converted |= {
                f"{key}_blocks": (codes[..., 0] | codes[..., 1] << 4).astype("uint8"),
                f"{key}_scales": scales,
            }
            numbers = (
                np.array(FLOAT4)[codes].reshape(*scales.shape, 32) * np.exp2(scales.astype("float64") - 127)[..., None]
            )
            means[key] = numbers.reshape(experts, rows, depth)
        return converted

    _, folder = write_folder("gpt-oss", tmp_path, convert, quantization_config={"quant_method": "mxfp4"})
    tensors = read_language_model(folder).tensors
    both, down = (means[f"model.layers.1.mlp.experts.{part}_proj"] for part in ("gate_up", "down"))
    for name, expected in (("gate", both[:, 0::2]), ("up", both[:, 1::2]), ("down", down)):
        tensor = tensors[f"blk.1.ffn_{name}_exps.weight"]
        assert tensor.type == "MXFP4" and tensor.data.nbytes == tensor.nbytes
        np.testing.assert_array_equal(numbers_of(tensor), expected)


@pytest.mark.parametrize("case", ["awq", "packed-8"])
def test_matrices_of_latent_attention(case, tmp_path):
    """Keys and values of all heads are split, and so become floats."""
    folder, reference, _ = quantized_folder(case, tmp_path, "deepseek2-lite")
    found, expected = (read_language_model(each).tensors["blk.1.attn_kv_b.weight"] for each in (folder, reference))
    assert found.type == "F16" and found.data.nbytes == found.nbytes
    np.testing.assert_allclose(found.data, expected.data, rtol=2**-10, atol=1e-7)
    rh.from_gguf(folder, context=64)


def test_plans_count_bits(tmp_path):
    folder, _, _ = quantized_folder("awq", tmp_path)
    tensor = read_language_model(folder).tensors["blk.0.ffn_up.weight"]
    for layout in layouts_of(parse_vdevices(["llvm", {"kind": "cuda", "arch": "sm_90"}])):
        # Half a byte of a weight; for 64 weights a scale of 4 bytes, and a minimum of up to 4.
        assert 0.5 + 5 / 64 <= resident_bytes(tensor, layout) / np.prod(tensor.shape) <= 0.5 + 8 / 64


def test_matrices_without_kernels_are_reported(tmp_path, caplog):
    folder, _, _ = quantized_folder("fp8-blocks", tmp_path)
    read_language_model(folder)
    assert "weights of fp8 become bfloat16, since no kernel reads their bits" in caplog.text


@pytest.mark.parametrize(
    "case, change, message",
    [
        ("awq", {"bits": 3}, "found AWQ of 3 bits"),
        ("awq", {"version": "gemv"}, "version 'gemv', expected 4 bits and gemm"),
        ("gptq", {"bits": 3}, "found GPTQ of 3 bits, expected 2, 4 or 8"),
        ("gptq", {"bits": "4"}, "bits of quantization_config is '4', expected a whole number"),
        ("gptq", {"quant_method": "bitsandbytes"}, "has the method 'bitsandbytes', expected one of awq"),
        ("fp8-blocks", {"weight_block_size": [64, 64]}, "has scales of shape"),
        ("fp8-blocks", {"weight_block_size": "all"}, "in blocks 'all', expected two axes"),
    ],
)
def test_wrong_configurations(case, change, message, tmp_path):
    folder, _, _ = quantized_folder(case, tmp_path)
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] |= change
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(FrontendError, match=message.replace("[", r"\[")):
        read_language_model(folder)
