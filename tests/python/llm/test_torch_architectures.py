"""Models of `transformers` with small sizes and random weights, whose logits are recorded for the other tests.

`python tests/python/llm/test_torch_architectures.py` records them anew.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from llm.architecture_models import (
    ENCODERS,
    LENGTHS,
    MODELS,
    RECORDED,
    ROWS,
    TOKENS,
    class_of,
    config_of,
    dense_layers,
    pooled,
    recorded,
    weights_of,
)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def network_of(name):
    """The network of `transformers` with the weights of the other tests, and the shapes of these."""
    model = (MODELS | ENCODERS)[name]
    family = model.family.removesuffix("LMHead")
    config_class = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    config = config_class(**config_of(model), attn_implementation="eager")
    without_pooler = {"add_pooling_layer": False} if family in ("Bert", "NomicBert") else {}
    network = getattr(transformers, class_of(model))(config, **without_pooler).float().eval()
    names = {key: re.sub("^(layers|embed_tokens|norm)", r"model.\1", key) for key in network.state_dict()}
    shapes = {names[key]: list(value.shape) for key, value in network.state_dict().items()}
    weights = weights_of(shapes)
    if config.tie_word_embeddings and not model.pooling:
        table = next(key for key in shapes if key.endswith(("embed_tokens.weight", "wte.weight")))
        weights["lm_head.weight"] = weights[table]
    network.load_state_dict({key: torch.from_numpy(weights[name]) for key, name in names.items()})
    return network, shapes


def fresh(name):
    """Names and shapes of a model's weights, and its logits or embeddings."""
    model = (MODELS | ENCODERS)[name]
    network, shapes = network_of(name)
    if model.pooling:
        return shapes, np.stack([embedding(model, network, TOKENS[:length]) for length in LENGTHS])
    with torch.no_grad():
        return shapes, network(torch.from_numpy(TOKENS)[None]).logits[0].numpy()[list(ROWS)]


def embedding(model, network, tokens):
    """The embedding of a text."""
    with torch.no_grad():
        results = network(torch.from_numpy(tokens)[None]).last_hidden_state[0].numpy()
    x = pooled(model, len(tokens)) @ results
    for matrix in dense_layers(model).values():
        x = matrix @ x
    return x


@pytest.mark.parametrize("name", [*MODELS, *ENCODERS])
def test_recorded_logits_are_those_of_transformers(name):
    (shapes, logits), (expected_shapes, expected) = recorded(name), fresh(name)
    assert shapes == expected_shapes
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def _record() -> None:
    arrays = {}
    for name in [*MODELS, *ENCODERS]:
        shapes, logits = fresh(name)
        arrays |= {f"{name}/shapes": np.array(json.dumps(shapes)), f"{name}/logits": logits}
    np.savez_compressed(RECORDED, **arrays)


if __name__ == "__main__":
    _record()
