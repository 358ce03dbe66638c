"""Programs in C++ run files of GPUs with the bits of Python: graphs, mailboxes, checks, donated arguments."""

import numpy as np
import onnx.parser
import pytest
from onnx import numpy_helper

import relax_hetero as rh
from cpp_programs import (
    check_classifier,
    check_run,
    check_similarity,
    compile_examples,
    compile_program,
    needs_compiler,
    output_of,
    small_network,
    tiny_minilm,
)
from models.running import GPU, STAND_IN, assert_both_devices_hold_ops, cut, needs_gpu
from models.zoo import node_names
from relax_hetero.artifact.commands import GRAPH

pytestmark = [pytest.mark.gpu, needs_gpu, needs_compiler]

# Calls with numbers from the command line, whose results are written to a file; what fails is printed. If the model has
# one input, numbers are its rows, and another thread makes the same calls on a machine of its own; else they are the
# second input.
PROGRAM = r"""
#include <fstream>
#include <iostream>
#include <relax_hetero.hpp>
#include <thread>

std::vector<float> call(relax_hetero::Model model, const std::vector<int64_t>& numbers) {
  relax_hetero::Function function = model["main"];
  std::vector<float> results;
  for (size_t i = 0; i < numbers.size(); ++i) {
    int64_t rows = function.info().num_inputs == 1 ? numbers[i] : 4;
    std::vector<float> x(static_cast<size_t>(rows) * 16);
    for (size_t k = 0; k < x.size(); ++k) x[k] = static_cast<float>(k % 37) / 8 - static_cast<float>(i);
    std::vector<relax_hetero::Tensor> inputs = {
        relax_hetero::Tensor::of<float>({rows, 16}, x, function.input_device(0))};
    if (function.info().num_inputs > 1)
      inputs.push_back(relax_hetero::Tensor::of<int64_t>({1}, {numbers[i]}, function.input_device(1)));
    try {
      std::vector<float> values;
      for (const relax_hetero::Tensor& result : function.run(inputs))
        for (float value : result.read<float>()) values.push_back(value);
      results.insert(results.end(), values.begin(), values.end());
    } catch (const relax_hetero::Error& error) {
      std::cout << error.what() << "\n";
    }
  }
  return results;
}

int main(int argc, char** argv) try {
  std::vector<int64_t> numbers;
  for (int i = 3; i < argc; ++i) numbers.push_back(std::stoi(argv[i]));
  relax_hetero::Model model(argv[1]), second(argv[1]);
  std::vector<float> others;
  bool has_thread = model["main"].info().num_inputs == 1;
  std::thread thread([&] { others = call(second, has_thread ? numbers : std::vector<int64_t>()); });
  std::vector<float> results = call(model, numbers);
  thread.join();
  second = relax_hetero::Model(argv[1]);  // frees the machine before
  if (has_thread && call(model, numbers) != results) throw std::runtime_error("later calls have other results");
  if (has_thread && others != results) throw std::runtime_error("the other thread has other results");
  std::ofstream file(argv[2], std::ios::binary);
  file.write(reinterpret_cast<const char*>(results.data()),
             static_cast<std::streamsize>(results.size() * sizeof(float)));
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << "\n";
  return 1;
}
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = compile_examples(tmp_path_factory.mktemp("programs"))
    (folder / "calls.cpp").write_text(PROGRAM)
    compile_program(folder / "calls.cpp", folder / "calls")
    return folder


def check_calls(programs, folder, executable, numbers):
    """Require the bits of Python, and its errors; returns these."""
    executable.export_library(folder / "calls.so")
    printed = output_of(programs / "calls", folder / "calls.so", folder / "results", *numbers)
    function, expected, errors = rh.vm.VirtualMachine(executable)["main"], b"", []
    has_one_input = len(executable.signature().inputs) == 1
    for place, number in enumerate(numbers):
        rows = number if has_one_input else 4
        x = (np.arange(16 * rows) % 37).astype("float32").reshape(rows, 16) / np.float32(8) - np.float32(place)
        try:
            results = function(x) if has_one_input else function(x, np.array([number]))
            results = results if isinstance(results, tuple) else (results,)
            expected += b"".join(np.asarray(result).tobytes() for result in results)
        except rh.HeteroError as error:
            errors.append(str(error))
    assert (folder / "results").read_bytes() == expected
    assert len(printed.splitlines()) == len(errors)
    for line, error in zip(printed.splitlines(), errors, strict=True):
        assert line in error
    return errors


def parsed(text, **weights):
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]>' + text)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


def weight(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype("float32")


def runs_as_graph(executable):
    return STAND_IN or any(region.runs == GRAPH for region in executable.metadata.regions)


def test_an_image_classifier(programs, tmp_path):
    executable = rh.compile(rh.from_onnx(small_network(), vdevices=[GPU]), cache=False)
    assert runs_as_graph(executable)
    check_classifier(programs, tmp_path, executable)


def test_sentence_similarity_on_two_devices(programs, tmp_path):
    model, tokens = tiny_minilm()
    names = node_names(model)
    placement = cut(names, [len(names) // 2])
    executable = rh.compile(rh.from_onnx(model, vdevices=["llvm", GPU], placement=placement), cache=False)
    assert_both_devices_hold_ops(executable)
    executable.export_library(tmp_path / "model.so")
    check_similarity(programs, tmp_path, tmp_path / "model.so", tokens)


def test_a_cache_that_calls_overwrite(programs, tmp_path):
    """A decode step: a row is added to a cache, which stays in place, and read by products of the other device."""
    model = parsed(
        """net (float[40, 16] cache, float[1, 16] row, int64[1, 1] place) => (float[40, 16] new, float[1, 40] scores) {
            new = ScatterND(cache, place, row)
            a = MatMul(row, w)
            t = Transpose(new)
            b = MatMul(a, t)
            scores = Softmax(b)
        }""",
        w=weight(16, 16),
    )
    mod = rh.from_onnx(model, vdevices=["llvm", GPU], placement={"Softmax": "llvm:0", "*": "vdevice:1"})
    executable = rh.compile(mod, donate=["cache"], cache=False)
    assert_both_devices_hold_ops(executable)
    inputs = {"cache": weight(40, 16), "row": weight(1, 16), "place": np.array([[7]])}
    check_run(programs, tmp_path, executable, inputs)


def test_sizes_that_change(programs, tmp_path):
    """Graphs are captured at the second call with a size, dropped when the arena grows, and when there are too many."""
    model = parsed(
        """net (float[n, 16] x) => (float[n, 16] z, float[n, 32] r) {
            y = MatMul(x, w) r = Relu(y) s = Softmax(r) z = MatMul(s, v) }""",
        w=weight(16, 32),
        v=weight(32, 16),
    )
    executable = rh.compile(rh.from_onnx(model, vdevices=[GPU]), cache=False)
    assert runs_as_graph(executable)
    rows = [3] * 30 + [5, 3, 5, 700, 3, 5, 3, 700, 700, 3] + [*range(1, 80)] * 3 + [3] * 20
    assert not check_calls(programs, tmp_path, executable, rows)


def alternating():
    """Ops of a GPU and of the CPU in turns, which exchange values while both run, and an index that the CPU checks."""
    return parsed("""net (float[4, 16] x, int64[1] i) => (float[4, 16] z, float[1, 16] p) {
        a = Exp(x) b = Tanh(a) c = Sigmoid(b) d = Tanh(c) e = Sigmoid(d) f = Tanh(e) g = Sigmoid(f)
        p = Gather(f, i) z = Add(g, a) }""")


def test_devices_that_exchange_values_while_both_run(programs, tmp_path):
    placement = {"Tanh": "llvm:0", "Gather": "llvm:0", "*": "vdevice:1"}
    mod = rh.from_onnx(alternating(), vdevices=[{"kind": "llvm", "num-cores": 1}, GPU], placement=placement)
    executable = rh.compile(mod, cache=False)
    metadata = executable.metadata
    assert STAND_IN or any(map(metadata.has_mailboxes, metadata.regions))
    assert len(check_calls(programs, tmp_path, executable, [0, 1, 9, 2, 3, -9, 1, 1])) == 2


def test_values_that_kernels_of_a_gpu_refuse(programs, tmp_path):
    model = parsed("net (float[4, 16] x, int64[1] i) => (float[1, 16] z) { y = Exp(x) z = Gather(y, i) }")
    executable = rh.compile(rh.from_onnx(model, vdevices=[GPU]), checks="strict", cache=False)
    errors = check_calls(programs, tmp_path, executable, [0, 3, 4, -4, -5, 1, 1, 9, 2])
    assert len(errors) == 3 and all("is out of range, expected -4 to 3" in error for error in errors)


@pytest.mark.skipif(bool(STAND_IN), reason="architectures are those of GPUs")
def test_code_for_other_gpus_is_refused(programs, tmp_path):
    mod = rh.from_onnx(
        parsed("net (float[4] x) => (float[4] y) { y = Exp(x) }"), vdevices=[{"kind": "cuda", "arch": "sm_80"}]
    )
    rh.compile(mod, cache=False).export_library(tmp_path / "model.so")
    np.ones(4, "float32").tofile(tmp_path / "x")
    printed = output_of(programs / "run", tmp_path / "model.so", 0, tmp_path / "results", tmp_path / "x", code=1)
    assert "cuda:0 was compiled for sm_80, which GPUs of compute capability 8.0 and newer ones of 8.x run" in printed
