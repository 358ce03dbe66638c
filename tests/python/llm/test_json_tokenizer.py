"""Tokenizers stored with ONNX models, against the package that wrote them."""

import json

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from relax_hetero.llm import JsonTokenizer, TokenizerError

TEXTS = ["A mouse ran away, quickly.", "Gr\u00fc\u00dfe \u2014 \U0001f600 na\u00efve", "  two  spaces\nand a line"]


def byte_level():
    """Byte-level tokenizer as in GPT-2, Llama 3 and Qwen, trained on few words."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|im_end|>"])
    tokenizer.train_from_iterator(TEXTS * 20, trainer)
    return tokenizer


def with_spaces():
    """Tokenizer as in Llama 2 and Gemma: spaces are a character, and other bytes fall back to byte tokens."""
    names = [f"<0x{byte:02X}>" for byte in range(256)] + ["\u2581", *"Amouseranway,quickl."] + ["\u2581ran", "</s>"]
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys(names))}
    merges = [("\u2581", "r"), ("\u2581r", "a"), ("\u2581ra", "n")]
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


def with_a_first_space() -> tokenizers.Tokenizer:
    """A tokenizer of the form of Llama 2: a text gets a space, which decoding strips."""
    tokenizer = with_spaces()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def unigram() -> tokenizers.Tokenizer:
    """A tokenizer of the form of T5 and XLM-RoBERTa."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    options = {"unk_token": "<unk>", "special_tokens": ["<unk>", "</s>"], "show_progress": False}
    tokenizer.train_from_iterator(TEXTS * 9, trainers.UnigramTrainer(vocab_size=90, **options))
    return tokenizer


def wordpiece() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    special = ["[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 9, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return tokenizer


@pytest.mark.sampled(1)
@pytest.mark.parametrize("make", [byte_level, with_spaces, with_a_first_space, unigram, wordpiece])
def test_texts_there_and_back(make, tmp_path):
    original = make()
    original.save(str(tmp_path / "tokenizer.json"))
    loaded = JsonTokenizer(tmp_path)
    for text in TEXTS:
        tokens = loaded.encode(text)
        assert tokens == original.encode(text).ids
        assert loaded.decode(tokens) == original.decode(tokens)
        assert make in (unigram, wordpiece) or loaded.decode(tokens) == text
    assert len(loaded) == original.get_vocab_size()


def test_names_of_tokens_as_text_change_nothing_else(tmp_path):
    original = byte_level()
    original.normalizer = normalizers.Lowercase()
    tokens = [AddedToken(name, special=name[1] == "|", normalized=False) for name in ("<a>", "<|b|>", "<|c|>", "<d>")]
    for token in tokens:
        (original.add_special_tokens if token.special else original.add_tokens)([token])
    original.save(str(tmp_path / "tokenizer.json"))
    loaded, text = JsonTokenizer(tmp_path), "A<a>b<|b|>C<d><|c|>"
    original.encode_special_tokens = True
    assert loaded.encode(text, special=False) == original.encode(text).ids != loaded.encode(text)
    assert [loaded.names[token] for token in loaded.encode("<a><|b|><|c|><d>")] == ["<a>", "<|b|>", "<|c|>", "<d>"]


def test_flags_of_the_configuration_add_no_token(tmp_path):
    """Transformers ignores them where there is a tokenizer.json."""
    processor = post({"<x>": {"id": "<x>", "ids": [2], "tokens": ["<x>"]}})
    config = {"bos_token": "b", "eos_token": "<x>", "add_bos_token": True, "add_eos_token": True}
    folder = folder_of(tmp_path, {"added_tokens": [END], "post_processor": processor}, tokenizer_config=config)
    assert JsonTokenizer(folder).encode("a") == [2, 0]


def test_words_of_html_end_no_text(tmp_path):
    original = byte_level()
    original.add_tokens(["</s>", "<eos>", "<|eot_id|>"])
    original.save(str(tmp_path / "tokenizer.json"))
    assert JsonTokenizer(tmp_path).stop_ids == {original.token_to_id(name) for name in ("<|im_end|>", "<|eot_id|>")}


def test_names_of_control_tokens_and_ends(tmp_path):
    original = byte_level()
    original.save(str(tmp_path / "tokenizer.json"))
    end = original.token_to_id("<|im_end|>")
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": {"eos_token_id": [7, 8]}}))
    config = {"bos_token": {"content": "<|im_end|>"}, "eos_token": "<|im_end|>", "chat_template": "{{ messages }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = JsonTokenizer(tmp_path)
    assert loaded.stop_ids == {7, 8, end} and loaded.begin_id == end
    assert loaded.chat_template == "{{ messages }}"
    assert loaded.encode("A<|im_end|>")[-1] == end and loaded.piece(end) == b""
    as_text = loaded.encode("A<|im_end|>", special=False)
    assert end not in as_text and loaded.decode(as_text) == "A<|im_end|>"


def test_folders_without_a_tokenizer_are_refused(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer.json: found no such file"):
        JsonTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="found no tokenizer"):
        JsonTokenizer(tmp_path)


WORDS = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
END = {"id": 2, "content": "<x>", "special": True} | dict.fromkeys(
    ("single_word", "lstrip", "rstrip", "normalized"), False
)
SINGLE = [{"SpecialToken": {"id": "<x>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]


def post(tokens: dict) -> dict:
    return {"type": "TemplateProcessing", "single": SINGLE, "pair": SINGLE, "special_tokens": tokens}


def folder_of(path, body, **files):
    text = body if isinstance(body, str) else json.dumps({"version": "1.0", "model": WORDS, **body})
    (path / "tokenizer.json").write_text(text)
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


@pytest.mark.parametrize(
    "body, message",
    [
        ("5", "found no tokenizer"),
        ("[]", "found no tokenizer"),
        ('{"model": 5}', "found no tokenizer"),
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ({"model": {}}, "refuses it"),
        ({"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}}, "refuses it"),
        ({"model": {"type": "Unheard"}}, "refuses it"),
        ({"model": {**WORDS, "vocab": {"a": 1 << 40}}}, "refuses it"),
        ({"model": {**WORDS, "vocab": {"\ud800": 1}}}, "refuses it"),
        ({"model": {**WORDS, "vocab": {"a": (1 << 32) - 1}}}, "found token 4,294,967,295, expected numbers up to"),
        ({"model": {**WORDS, "vocab": {"a": 3, "b": 3}}}, "as token 3, expected one of them"),
        (
            {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}},
            "refuses",
        ),
        ({"normalizer": json.loads('{"a":' * 200 + "1" + "}" * 200)}, "refuses it"),
        ({"added_tokens": [{**END, "id": 7}]}, "found '<x>' as token 7, expected 2"),
        ({"added_tokens": 5}, "refuses it"),
        (
            {"post_processor": post({"<x>": {"id": "<x>", "ids": [9], "tokens": ["<x>"]}})},
            "texts have or end with token 9",
        ),
        ({"post_processor": post({"<y>": {"id": "<y>", "ids": [1], "tokens": ["<y>"]}})}, "refuses|fails on a text"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_damaged_files(tmp_path, body, message):
    with pytest.raises(TokenizerError, match=message):
        JsonTokenizer(folder_of(tmp_path, body))


@pytest.mark.parametrize(
    "files, message",
    [
        ({"tokenizer_config": [1]}, "expected names and values"),
        ({"genai_config": "a"}, "expected names and values"),
        ({"generation_config": {"eos_token_id": 1 << 40}}, "texts have or end with token 1099511627776"),
        ({"generation_config": {"eos_token_id": [-1]}}, "texts have or end with token -1"),
        ({"generation_config": {"top_p": 2}}, r"generation_config.json: top_p: found 2"),
        ({"generation_config": {"temperature": 10**400}}, r"generation_config.json: temperature: found 10000"),
        ({"generation_config": {"temperature": "hot"}}, r"generation_config.json: temperature: found 'hot'"),
        ({"tokenizer_config": {"bos_token": "\ud800"}}, "as the name of a token"),
    ],
    ids=str,
)
def test_damaged_companion_files(tmp_path, files, message):
    with pytest.raises(TokenizerError, match=message):
        JsonTokenizer(folder_of(tmp_path, {}, **files))


def test_malformed_byte_tokens_are_text(tmp_path):
    names = ["<0xZZ>", "<0x+1>", "<0x 1>", "<0x41>", "<0x9f>"]
    vocabulary = {name: token for token, name in enumerate(names)}
    loaded = JsonTokenizer(folder_of(tmp_path, {"model": {**WORDS, "vocab": vocabulary, "unk_token": names[0]}}))
    assert [loaded.piece(token) for token in range(5)] == [b"<0xZZ>", b"<0x+1>", b"<0x 1>", b"A", b"\x9f"]


def test_texts_are_neither_cut_nor_filled_up(tmp_path):
    body = {
        "pre_tokenizer": {"type": "Whitespace"},
        "truncation": {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "padding": {
            "strategy": {"Fixed": 1 << 40},
            "direction": "Right",
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "a",
        }
        | {"pad_to_multiple_of": None},
    }
    assert JsonTokenizer(folder_of(tmp_path, body)).encode("b b b b") == [1] * 4
    with pytest.raises(TokenizerError, match="fails on a text"):
        JsonTokenizer(folder_of(tmp_path, {"model": {**WORDS, "unk_token": "none"}})).encode("c")
