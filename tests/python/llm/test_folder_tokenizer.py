"""Tokenizers of folders of Hugging Face, against the packages whose files they have."""

from __future__ import annotations

import io
import json
import random

import pytest
import tokenizers
from tokenizers import BertWordPieceTokenizer

from llm.test_json_tokenizer import byte_level, unigram, wordpiece
from relax_hetero.llm import JsonTokenizer, Tokenizer, TokenizerError, load_tokenizer

sentencepiece = pytest.importorskip("sentencepiece")

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "  two  spaces, \u00e9t\u00e9 and a tab\t.",
    "\uff21\uff22\uff23 \u2460 \ufb01ne \u65e5\u672c\u8a9e \U0001f600",
    "<x> 12,345 don't \n\n lines",
    "",
]


def trained(model_type: str, **options) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS[:2] * 20 + ["quickly the foxes jumped"] * 20),
        model_writer=model,
        model_type=model_type,
        vocab_size=320 if options.get("byte_fallback") else 60,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "model_type, options",
    [
        ("unigram", {}),
        ("unigram", {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}),
        ("unigram", {"byte_fallback": True, "user_defined_symbols": ["ow"], "add_dummy_prefix": False}),
        ("bpe", {}),
        ("bpe", {"remove_extra_whitespaces": False, "byte_fallback": True}),
        ("bpe", {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": False}),
    ],
)
def test_models_of_sentencepiece(tmp_path, model_type, options):
    data = trained(model_type, **options)
    (tmp_path / "tokenizer.model").write_bytes(data)
    ours, theirs = load_tokenizer(tmp_path), sentencepiece.SentencePieceProcessor(model_proto=data)
    assert isinstance(ours, Tokenizer) and len(ours) == theirs.get_piece_size()
    for text in TEXTS:
        tokens = ours.encode(text, special=False, begin=False)
        assert tokens == theirs.encode(text)
        if theirs.unk_id() not in tokens:
            assert ours.decode(tokens) == theirs.decode(tokens)
    assert (ours.begin_id, ours.stop_ids) == (theirs.bos_id(), {theirs.eos_id()})


def test_files_beside_a_model_of_sentencepiece(tmp_path):
    (tmp_path / "spiece.model").write_bytes(trained("bpe", byte_fallback=True))
    size = len(load_tokenizer(tmp_path))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<tool>": size}))
    decoder = {str(size + 2): {"content": "<|im_end|>", "special": True}}
    config = {"added_tokens_decoder": decoder, "eos_token": {"content": "<|im_end|>"}, "add_eos_token": True}
    config["chat_template"] = [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "a"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    sampling = {"temperature": 0.7, "top_k": -1, "top_p": 0.8, "min_p": None, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [size + 2, 2], **sampling}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.names[size:] == ["<tool>", f"[PAD{size + 1}]", "<|im_end|>"]
    assert tokenizer.encode("<tool>", special=False) == [1, size, size + 2]
    assert tokenizer.stop_ids == {2, size + 2} and tokenizer.chat_template == "a"
    assert tokenizer.sampling_defaults == {"temperature": 0.7, "top_k": 0, "top_p": 0.8}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": size + 3}))
    with pytest.raises(TokenizerError, match=f"texts end with token {size + 3}, expected one below"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "lowercase, options", [(False, {}), (True, {}), (True, {"strip_accents": False}), (False, {"strip_accents": True}),
                           (True, {"tokenize_chinese_chars": False})],
)  # fmt: skip
def test_words_of_bert(tmp_path, lowercase, options):
    pieces = "the qu ##ick ##i ##c ##k fox ##es don ' t , \u00e9t\u00e9 ete \u65e5".split()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces]
    end = "\r\n" if lowercase else "\n"
    (tmp_path / "vocab.txt").write_bytes("".join(name + end for name in names).encode())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lowercase, **options}))
    ours = load_tokenizer(tmp_path)
    package = {
        {"tokenize_chinese_chars": "handle_chinese_chars"}.get(key, key): value for key, value in options.items()
    }
    theirs = BertWordPieceTokenizer(str(tmp_path / "vocab.txt"), lowercase=lowercase, **package)
    for text in [*TEXTS, "The quick foxes, don't! \u00c9t\u00e9", "unquick \u65e5\u672c \u65e5"]:
        assert ours.encode(text) == theirs.encode(text).ids
    assert ours.decode(ours.encode("the foxes, don't")) == "the foxes , don ' t"


def test_a_tokenizer_json_comes_first(tmp_path):
    with pytest.raises(TokenizerError, match="found no tokenizer, expected one of tokenizer.json, tokenizer.model"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.txt").write_text("[UNK]\n")
    with pytest.raises(TokenizerError, match=r"vocab.txt: found no '\[CLS\]', expected a line of it"):
        load_tokenizer(tmp_path)
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    assert isinstance(load_tokenizer(tmp_path), JsonTokenizer)


DAMAGED = [b"", b"\x0a", b"\x0a\x7f", b"abc", b"\xff" * 20, b"\x0a\x03\x0a\x01\xff", b"\x12\x02\x18\x07"]


@pytest.mark.parametrize("data", DAMAGED)
def test_damaged_models(tmp_path, data):
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(TokenizerError, match="tokenizer"):
        load_tokenizer(tmp_path)


JUNK = [None, -1, 0, 1 << 40, 1e300, "", "a", "\ud800", [], [0], ["a"], {}, {"a": 1}, True, float("nan")]


def mutated(draw: random.Random, value):
    """A value of JSON in which one part is missing or another one."""
    if not isinstance(value, (dict, list)) or not value:
        return draw.choice(JUNK)
    copy = value.copy()
    key = draw.choice(sorted(copy)) if isinstance(copy, dict) else draw.randrange(len(copy))
    match draw.randrange(6):
        case 0:
            del copy[key]
        case 1:
            copy[key] = draw.choice(JUNK)
        case _:
            copy[key] = mutated(draw, copy[key])
    return copy


COMPANIONS = {
    "tokenizer_config": {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>"},
        "added_tokens_decoder": {"3": {"content": "<x>", "special": True}},
        "chat_template": [{"name": "default", "template": "a"}],
    },
    "generation_config": {"eos_token_id": [1, 2]},
    "config": {"text_config": {"eos_token_id": 2}},
    "added_tokens": {"<y>": 70},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("make", [byte_level, unigram, wordpiece, None])
def test_damaged_folders(make, tmp_path):
    """Each is refused by an error of ours, or encodes and decodes."""
    draw, refused = random.Random(getattr(make, "__name__", "pieces")), 0
    model, original = trained("unigram"), make and json.loads(make().to_str())
    for _ in range(100):
        if make is None:
            data = bytearray(model)
            for _ in range(draw.choice([0, 1, 3, 30])):
                data[draw.randrange(len(data))] = draw.randrange(256)
            (tmp_path / "tokenizer.model").write_bytes(data[: draw.choice([len(data), draw.randrange(len(data))])])
        else:
            (tmp_path / "tokenizer.json").write_text(json.dumps(mutated(draw, original)))
        for name, value in COMPANIONS.items():
            changed = mutated(draw, value) if draw.random() < 0.25 else value
            (tmp_path / f"{name}.json").write_text(json.dumps(changed))
        try:
            tokenizer = load_tokenizer(tmp_path)
            for text in TEXTS:
                assert isinstance(tokenizer.decode(tokenizer.encode(text)), str)
        except TokenizerError:
            refused += 1
    assert 10 < refused < 100
