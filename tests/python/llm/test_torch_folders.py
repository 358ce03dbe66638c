"""Folders that transformers writes, against its own logits and against GGUF files of the same weights."""

import numpy as np
import pytest

from llm.gguf_files import MODELS, write_gguf
from llm.hub_files import ARCHITECTURES, HUB_MODELS, architecture_file, assert_same_model, write_pooling
from llm.run_gguf import run
from llm.test_torch_architectures import network_of
from llm.test_torch_reference import model_of

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

TOKENS = np.random.default_rng(1).integers(0, 300, 80)


def save_model(name, folder):
    """A GGUF file and a folder with the same random weights; returns the model of transformers."""
    model = model_of(write_gguf(folder / "model.gguf", MODELS[name]), MODELS[name])
    model.save_pretrained(folder / "hub")
    return model


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
def test_folder_has_the_tensors_and_numbers_of_the_file(name, tmp_path):
    save_model(name, tmp_path)
    assert_same_model(tmp_path / "hub", tmp_path / "model.gguf")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", HUB_MODELS)
def test_folder_of_an_architecture_is_its_file(name, tmp_path):
    network, shapes = network_of(name)
    network.save_pretrained(tmp_path / "hub")
    write_pooling(ARCHITECTURES[name], tmp_path / "hub")
    assert_same_model(tmp_path / "hub", architecture_file(name, shapes, tmp_path))


@pytest.mark.parametrize("name", MODELS)
def test_folder_has_the_logits_of_transformers(name, tmp_path):
    model = save_model(name, tmp_path)
    with torch.no_grad():
        expected = model(torch.from_numpy(TOKENS)[None]).logits[0].numpy()
    logits = run(tmp_path / "hub", TOKENS, 5)
    assert expected.std() > 0.5
    np.testing.assert_allclose(logits, expected, atol=5e-4)
