"""Models in 8 bits: QDQ files that ONNX Runtime's quantizer makes of float models.

``minilm`` is calibrated with sentences, and all its products are quantized. Other models have random weights, and are
calibrated with random inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx

from .sentences import use_sentence_example

Inputs = dict[str, np.ndarray]
_FEEDS = 8


def write_quantized(name: str, source: Path, target: Path, inputs: Callable[[Path, int], Inputs]) -> None:
    """Write the QDQ model of a float one; needs onnxruntime.

    Parameters
    ----------
    name : str
        Name of the float model in the zoo.
    source, target : Path
    inputs : Callable
        Returns random inputs of a model for a seed.
    """
    use_sentence_example()
    from minilm import default_cache
    from quantize import TRANSFORMER_OPS, quantize, sentence_feeds

    if name == "minilm":
        quantize(source, target, sentence_feeds(default_cache(), 1, 128), TRANSFORMER_OPS)
        return
    ops = {node.op_type for node in onnx.load(str(source), load_external_data=False).graph.node}
    feeds = (inputs(source, seed) for seed in range(1, _FEEDS + 1))
    quantize(source, target, feeds, TRANSFORMER_OPS if "LayerNormalization" in ops else None)
