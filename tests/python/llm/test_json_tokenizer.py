"""Tokenizers beside ONNX models, against the package that wrote them."""

import json

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from relax_hetero.llm import JsonTokenizer, TokenizerError

TEXTS = ["A mouse ran away, quickly.", "Gr\u00fc\u00dfe \u2014 \U0001f600 na\u00efve", "  two  spaces\nand a line"]


def byte_level():
    """As GPT-2, Llama 3 and Qwen have it, trained on few words."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|im_end|>"])
    made.train_from_iterator(TEXTS * 20, trainer)
    return made


def with_spaces():
    """As Llama 2 and Gemma have it: spaces are a character, and bytes that no token has are tokens."""
    names = [f"<0x{byte:02X}>" for byte in range(256)] + ["\u2581", *"Amouseranway,quickl."] + ["\u2581ran", "</s>"]
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys(names))}
    merges = [("\u2581", "r"), ("\u2581r", "a"), ("\u2581ra", "n")]
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken("</s>", special=True)])
    return made


@pytest.mark.parametrize("make", [byte_level, with_spaces])
def test_texts_there_and_back(make, tmp_path):
    made = make()
    made.save(str(tmp_path / "tokenizer.json"))
    found = JsonTokenizer(tmp_path)
    for text in TEXTS:
        tokens = found.encode(text)
        assert tokens == made.encode(text).ids
        assert found.decode(tokens) == text
    assert len(found) == made.get_vocab_size()


def test_names_of_control_tokens_and_ends(tmp_path):
    made = byte_level()
    made.save(str(tmp_path / "tokenizer.json"))
    end = made.token_to_id("<|im_end|>")
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": {"eos_token_id": [7, 8]}}))
    config = {"bos_token": {"content": "<|im_end|>"}, "eos_token": "<|im_end|>", "chat_template": "{{ messages }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = JsonTokenizer(tmp_path)
    assert found.stop_ids == {7, 8, end} and found.begin_id == end
    assert found.chat_template == "{{ messages }}"
    assert found.encode("A<|im_end|>")[-1] == end and found.piece(end) == b""
    as_text = found.encode("A<|im_end|>", special=False)
    assert end not in as_text and found.decode(as_text) == "A<|im_end|>"


def test_folders_without_a_tokenizer_are_refused(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer.json: found no such file"):
        JsonTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="found no tokenizer"):
        JsonTokenizer(tmp_path)
