"""The float64 reference against the authors' models in `transformers`, with the same random weights."""

import numpy as np
import pytest

from llm.gguf_files import MODELS, write_gguf
from llm.hub_files import CLASSES, config_of, family_of, state_of
from llm.reference_model import ReferenceModel

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def model_of(path, sizes):
    """The model of transformers with the weights of a file."""
    config, model = (getattr(transformers, name) for name in CLASSES[family_of(sizes)])
    model = model(config(**config_of(sizes, ReferenceModel(path)), attn_implementation="eager")).eval()
    model.load_state_dict({name: torch.from_numpy(weight) for name, weight in state_of(path, sizes).items()})
    return model


@pytest.mark.parametrize("name", MODELS)
def test_reference_computes_what_transformers_does(name, tmp_path):
    sizes = MODELS[name]
    path = write_gguf(tmp_path / "model.gguf", sizes)
    reference, model = ReferenceModel(path), model_of(path, sizes)
    tokens = np.random.default_rng(1).integers(0, sizes.vocabulary, 100)
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    assert expected.std() > 0.5
    np.testing.assert_allclose(reference.logits(tokens), expected, atol=2e-4)
