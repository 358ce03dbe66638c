"""Every ```python block of the documents runs as it stands, in a file of its own (TVMScript needs one).

A block followed by a ```text block must print exactly that; where the text begins and ends with a line of dots, the
output must hold the lines between.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import onnx.parser
import pytest
from onnx import numpy_helper

from llm.gguf_files import Sizes, write_gguf

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOK = re.compile(r"\A---\njupyt")  # its blocks are cells of one program, and have a test of their own
PATH = re.compile(r"`([\w.-]+(?:/[\w.-]+)*(?:/|\.py))`")
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\s*```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)


MODEL = """
    <ir_version: 8, opset_import: ["" : 17]>
    ranker (float[4, 64] x) => (int64[4] best) {
        [embed] h = MatMul(x, w)
        [relu] a = Relu(h)
        [score] s = MatMul(a, v)
        [softmax] p = Softmax(s)
        [choose] best = ArgMax <axis = 1, keepdims = 0> (p)
    }"""
"""Model that README.md and index.md read as `model.onnx`: that of their picture."""


def write_model(path):
    model = onnx.parser.parse_model(MODEL)
    for name, shape in (("w", (64, 512)), ("v", (512, 10))):
        model.graph.initializer.append(numpy_helper.from_array(np.ones(shape, "float32"), name))
    onnx.save(model, path)


def blocks():
    for document in PAGES:
        text = document.read_text()
        if NOTEBOOK.match(text):
            continue
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            # They start Ray, compile a whole network twice, which others do once, or compile a language model.
            costly = r"rh\.cluster\.Cluster\(|light_squeezenet|rh\.llm\.load\("
            slow = [pytest.mark.slow] if re.search(costly, match[1]) else []
            yield pytest.param(match[1], match[2], id=f"{document.relative_to(ROOT)}:{line}", marks=slow)


# Imports what every block imports, then runs each script that it is told of in a fork of its own. What is imported is
# neither looked at by the garbage collector of a fork nor taken apart at its end: both take longer than most scripts.
SERVER = """
import atexit, gc, importlib, json, os, pkgutil, runpy, sys, threading
import numpy, onnx, tvm, relax_hetero

for module in pkgutil.walk_packages(relax_hetero.__path__, "relax_hetero."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)

def run(folder):
    os.chdir(folder)
    # Linking an executable for the cache takes as long as compiling a small model.
    os.environ["RELAX_HETERO_CACHE"] = os.path.join(folder, "cache") if "cache=" in open("example.py").read() else "off"
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.path[0] = folder
    runpy.run_path("example.py", run_name="__main__")

def end():
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

gc.collect()
gc.freeze()
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        run(json.loads(line))
        end()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def server():
    settings = {"TVM_NUM_THREADS": "2", "TVM_BIND_THREADS": "0", "PYTHONPATH": str(ROOT / "python")}
    command, env = [sys.executable, "-c", SERVER], {**os.environ, **settings}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.stdin.close()


@pytest.mark.parametrize(("code", "output"), list(blocks()))
def test_block_runs(code, output, tmp_path, server):
    for package in ("torch", "openvino", "iree.runtime", "llama_cpp"):
        if re.search(rf"^import {package}$", code, re.MULTILINE):
            pytest.importorskip(package)
    (tmp_path / "example.py").write_text(code)
    if 'from_onnx("model.onnx"' in code and "onnx.save" not in code:
        write_model(tmp_path / "model.onnx")
    if '"model.gguf"' in code:
        write_gguf(tmp_path / "model.gguf", Sizes(vocabulary=320), "Q8_0")
    print(json.dumps(str(tmp_path)), file=server.stdin, flush=True)
    status = server.stdout.readline().strip()
    assert status == "0", (tmp_path / "err").read_text()
    if output is not None:
        printed = (tmp_path / "out").read_text()
        # Tables pad their titles.
        actual, expected = ("\n".join(map(str.rstrip, text.strip().splitlines())) for text in (printed, output))
        if expected.startswith("...\n") and expected.endswith("\n..."):
            assert expected[4:-4] in actual
        else:
            assert actual == expected


def test_the_page_on_encodings_shows_what_the_passes_make():
    """On failure: python docs/tools/encoding_stages.py --write, and see whether its text still fits."""
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "tools" / "encoding_stages.py", "--check"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_on_architectures_shows_the_rows():
    """On failure: python docs/tools/architecture_table.py --write."""
    words = [sys.executable, ROOT / "docs" / "tools" / "architecture_table.py", "--check"]
    settings = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run(words, env=settings, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr


def test_links_between_documents_lead_somewhere():
    for document in (*PAGES, ROOT / "CHANGELOG.md"):
        prose = re.sub(r"^ *```.*?^ *```|`[^`\n]*`(?!\])", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target, anchor in re.findall(r"\]\((?!https?:)([\w./-]+)(?:#([\w-]+))?\)", prose):
            path = document.parent / target
            assert path.exists(), f"{document.relative_to(ROOT)} links to {target}"
            assert not anchor or anchor in anchors(path), f"{document.relative_to(ROOT)} links to {target}#{anchor}"


def anchors(document):
    """The headings of a page, as links name them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_files_and_folders_named_in_documents_exist():
    """``transform/fuse/form_rows.py`` and ``apps/bench/``: below the package, the checkout, its documents or tests."""
    bases = [ROOT / "python" / "relax_hetero", ROOT, ROOT / "docs", ROOT / "apps" / "bench", ROOT / "tests" / "python"]
    for document in PAGES:
        prose = re.sub(r"^ *```.*?^ *```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
        for path in PATH.findall(prose):
            exists = any((base / path).exists() for base in (*bases, document.parent))
            assert exists, f"{document.relative_to(ROOT)} names {path}"
