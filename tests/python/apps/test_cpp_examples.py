"""Programs in C++ run exported files, with the bits of Python."""

from __future__ import annotations

import shutil
import subprocess
import sys

import numpy as np
import onnx.parser
import pytest

import relax_hetero as rh
from cpp_programs import (
    EXAMPLE,
    check_classifier,
    check_run,
    check_similarity,
    compile_examples,
    needs_compiler,
    output_of,
    small_network,
    tiny_minilm,
)
from device_pairs import TWO_DEVICES
from models.attention_graphs import bert
from models.loops import LOOP_INPUTS, collecting_loop
from models.running import assert_both_devices_hold_ops, cut
from models.zoo import inputs_of, node_names, random_model
from relax_hetero.target.c_options import CMAKE_FOLDER, compile_options, link_options

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The folder of the compiled programs."""
    return compile_examples(tmp_path_factory.mktemp("programs"))


def test_an_image_classifier(programs, tmp_path):
    check_classifier(programs, tmp_path, rh.compile(rh.from_onnx(small_network())))
    assert "not a picture in PPM" in output_of(programs / "classify", tmp_path / "model.so", __file__, code=1)


@pytest.mark.slow  # compiles a network of 26 convolutions
def test_squeezenet(programs, tmp_path):
    check_classifier(programs, tmp_path, rh.compile(rh.from_onnx(random_model("squeezenet"))))


def test_sentence_similarity_on_two_devices(programs, tmp_path):
    model, tokens = tiny_minilm()
    names = node_names(model)
    placement = cut(names, [len(names) // 2])
    executable = rh.compile(rh.from_onnx(model, vdevices=TWO_DEVICES, placement=placement))
    assert_both_devices_hold_ops(executable)
    executable.export_library(tmp_path / "model.so")
    check_similarity(programs, tmp_path, tmp_path / "model.so", tokens)


@pytest.mark.slow  # compiles MiniLM twice, and configures CMake
@pytest.mark.skipif(shutil.which("cmake") is None, reason="no CMake")
def test_minilm_and_cmake(tmp_path):
    from export import main

    main([str(tmp_path)])
    settings = [f"-Drelax_hetero_DIR={CMAKE_FOLDER}", f"-DPython_EXECUTABLE={sys.executable}"]
    for command in (["cmake", "-S", EXAMPLE, "-B", tmp_path, *settings], ["cmake", "--build", tmp_path]):
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    numbers = np.fromfile(tmp_path / "tokens.bin", "int64")
    ids, mask = numbers[2:].reshape(2, *numbers[:2])
    for name in ("similarity.so", "similarity_two.so"):
        check_similarity(tmp_path, tmp_path, tmp_path / name, {"input_ids": ids, "attention_mask": mask})


def test_two_devices_and_results_of_integers(programs, tmp_path):
    model = bert()
    names = node_names(model)
    executable = rh.compile(rh.from_onnx(model, vdevices=TWO_DEVICES, placement=cut(names, [3, len(names) - 4])))
    assert_both_devices_hold_ops(executable)
    printed = check_run(programs, tmp_path, executable, inputs_of(model))
    assert printed.startswith("device llvm:0\ndevice llvm:1\nfunction main\n  takes x: float32[1, 21, 32]\n")


def test_functions_of_python_that_files_bring_along(programs, tmp_path):
    """A loop that collects rows until a condition holds, NonZero, and a shape that is read."""
    check_run(programs, tmp_path, rh.compile(rh.from_onnx(collecting_loop())), LOOP_INPUTS)


def test_errors_say_what_is_wrong(programs, tmp_path):
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        net (float[5, 4] x, int64[2] i) => (float[2, 4] y) { y = Gather(x, i) }""")
    executable = rh.compile(rh.from_onnx(model))
    check_run(programs, tmp_path, executable, {"x": np.ones((5, 4), "float32"), "i": np.array([4, -5])})
    run = [programs / "run", tmp_path / "model.so", 0, tmp_path / "results", tmp_path / "x.bin"]
    assert "expects 2 arguments (x, i), but 1 arguments" in output_of(*run, code=1)
    np.array([0, 5]).tofile(tmp_path / "i.bin")
    assert "index 5 is out of range, expected -5 to 4" in output_of(*run, tmp_path / "i.bin", code=1)
    assert "i.bin: rh_tensor_write: found 16 bytes, expected 80" in output_of(*run[:4], tmp_path / "i.bin", code=1)
    (tmp_path / "other.so").write_bytes(b"no library")
    assert "other.so" in output_of(programs / "run", tmp_path / "other.so", 0, tmp_path / "results", code=1)


PROGRAM_IN_C = r"""
#include <relax_hetero.h>

int main(int argc, char **argv) {
    DLDevice cpu = {kDLCPU, 3};
    rh_model *model = rh_load(argv[argc - 1], &cpu, 1);
    if (model == NULL)
        return puts(rh_error()), 1;
    const rh_function_info *function = rh_find(model, "main");
    int64_t shape[] = {2, 3}, other[] = {4, 4}, third[] = {3, 4};
    float ones[12] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, product[8];
    rh_tensor *args[] = {rh_tensor_new(rh_float32, 2, shape, cpu), rh_tensor_new(rh_float32, 2, other, cpu)}, *y = NULL;
    rh_tensor_write(args[0], ones, 6 * sizeof(float));
    if (rh_run(model, function, args, 2, &y, 1) < 0)
        puts(rh_error());
    rh_tensor_free(args[1]);
    args[1] = rh_tensor_new(rh_float32, 2, third, cpu);
    rh_tensor_write(args[1], ones, sizeof ones);
    if (rh_run(model, function, args, 2, &y, 1) != 1 || rh_tensor_read(y, product, sizeof product) != 0)
        return puts(rh_error()), 1;
    printf("%s on device %d: %g\n", function->outputs[0].type, rh_tensor_dl(y)->device.device_id, product[7]);
    if (rh_find(model, "other") == NULL)
        puts(rh_error());
    rh_tensor_free(args[0]), rh_tensor_free(args[1]), rh_tensor_free(y), rh_free(model);
    return 0;
}
"""


def test_a_program_in_c(tmp_path):
    """Another device of the same type, and sizes that a call refuses."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        net (float[n, k] x, float[l, 4] y) => (float[n, 4] z) { z = MatMul(x, y) }""")
    rh.compile(rh.from_onnx(model)).export_library(tmp_path / "model.so")
    (tmp_path / "program.c").write_text(PROGRAM_IN_C)
    command = ["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "program.c", "-o", "program"]
    subprocess.run([*command, *compile_options(), *link_options()], cwd=tmp_path, check=True)
    refusal, result, unknown = output_of(tmp_path / "program", tmp_path / "model.so").splitlines()
    assert refusal.startswith("function 'main': ") and refusal.endswith("expected k == l (k = 3, l = 4)")
    assert result == "float32[n, 4] on device 3: 3"
    assert unknown == "other: no function of the model has this name, expected one of main"
