"""Static quantization of ONNX files with ONNX Runtime's quantizer; all-MiniLM-L6-v2 is calibrated with sentences."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import onnx
from minilm import SentenceTokenizer, onnx_path
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

TRANSFORMER_OPS = ("MatMul", "Gemm", "Gather")
"""Quantized ops of a transformer: products and embeddings. Additions are not quantized, because a mask that adds -1e9
would leave two values for everything else; norms and softmax stay in float32, too."""
KEPT = ("/encoder/*/feed_forward/down/*",)
"""Nodes of MiniLM that stay in float32: their inputs have a few large numbers, and an 8-bit range that includes these
is too coarse for the many small ones. The cosine to embeddings in float32 is 0.99; with these nodes quantized, 0.93."""
CALIBRATION_SENTENCES = (
    "How can I get a new password?",
    "You can change your credentials on the account page.",
    "Our office is closed on public holidays.",
    "The cat sleeps on the warm windowsill.",
    "A cheesecake needs an hour in the oven.",
    "The invoice was paid twice by mistake.",
    "How do I install the printer driver?",
    "She plays the violin in an orchestra.",
    "My screen stays black after the update.",
    "Rain is expected in the afternoon, with strong winds from the west.",
    "The recipe calls for two eggs and a cup of flour.",
    "Where can I see my orders?",
    "He ran ten kilometers before breakfast.",
)
_OPSET = 17


class _Feeds(CalibrationDataReader):
    def __init__(self, feeds: Iterable[dict[str, np.ndarray]]) -> None:
        self._feeds = iter(feeds)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._feeds, None)


def quantize(
    source: Path,
    target: Path,
    feeds: Iterable[dict[str, np.ndarray]],
    op_types: Sequence[str] | None = None,
    keep: Sequence[str] = (),
) -> None:
    """Write ``target``, the QDQ model of ``source``: activations uint8 per tensor, weights int8 per channel.

    Parameters
    ----------
    source, target : Path
    feeds : iterable of dict
        Inputs to calibrate with.
    op_types : sequence of str, optional
        ONNX ops to quantize, with ranges that cover 99.999% of the calibration values; by default all ops that the
        quantizer supports, with ranges from the smallest to the largest value.
    keep : sequence of str
        Patterns of names of nodes that are not quantized.
    """
    model = onnx.load(str(source))
    if model.opset_import[0].version < _OPSET:  # scales per channel need 13
        model = onnx.version_converter.convert_version(model, _OPSET)
    for node in model.graph.node:
        # Exporters wrote residuals this way; the quantizer supports only Add.
        if node.op_type == "Sum" and len(node.input) == 2:
            node.op_type = "Add"
    with tempfile.TemporaryDirectory() as folder:
        upgraded, prepared = Path(folder) / "upgraded.onnx", Path(folder) / "prepared.onnx"
        onnx.save(model, upgraded)
        quant_pre_process(upgraded, prepared, skip_symbolic_shape=True)
        names = [node.name for node in onnx.load(str(prepared), load_external_data=False).graph.node]
        # Written under another name and renamed, so that an interrupted run does not leave an incomplete file.
        unfinished = target.with_suffix(f".{os.getpid()}.tmp")
        quantize_static(
            prepared,
            unfinished,
            _Feeds(feeds),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=list(op_types) if op_types else None,
            nodes_to_exclude=[name for name in names if any(fnmatch(name, pattern) for pattern in keep)],
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod.Percentile if op_types else CalibrationMethod.MinMax,
        )
        os.replace(unfinished, target)


def sentence_feeds(cache: Path, batch: int, seq: int) -> Iterator[dict[str, np.ndarray]]:
    """MiniLM's inputs for calibration: each sentence, and all of them concatenated."""
    tokenizer = SentenceTokenizer(cache, seq)
    text_of_all = " ".join(CALIBRATION_SENTENCES)
    for text in (*CALIBRATION_SENTENCES, text_of_all, f"{text_of_all} {text_of_all}"):
        yield tokenizer([text] * batch)


def quantized_minilm(cache: Path, batch: int, seq: int) -> Path:
    """The quantized ONNX file for ``[batch, seq]`` in ``cache``, made on first use."""
    source = onnx_path(cache, batch, seq)
    target = source.with_suffix(".int8.onnx")
    if not target.exists():
        quantize(source, target, sentence_feeds(cache, batch, seq), TRANSFORMER_OPS, KEPT)
    return target
