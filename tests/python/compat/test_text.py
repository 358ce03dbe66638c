"""Sessions of models that split and change text; the expected results are ONNX Runtime's."""

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx.reference import ReferenceEvaluator

from relax_hetero import compat
from relax_hetero.compat.errors import Fail
from relax_hetero.compat.text import Tokenizer

CPU = ["CPUExecutionProvider"]
TOKENS = 'mark = 0, mincharnum = 1, pad_value = "#"'
TEXTS = ["The sea, and a BOAT!", "no trees; winter_1 bread", "", "Ünï çédé sea"]
"""The last has letters that are not of RE2's ASCII classes."""


def counts(tokenizer, normalizer='case_change_action = "LOWER", is_case_sensitive = 0', steps="n"):
    """A model that counts three words."""
    return onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        g (string[rows, 1] text, float[1] scale) => (float[rows, 3] y) <int64[1] flat = {{-1}}> {{
            f = Reshape(text, flat)
            n = StringNormalizer <locale = "C.UTF-8", {normalizer}> (f)
            t = com.microsoft.Tokenizer <{TOKENS}, {tokenizer}> ({steps})
            c = TfIdfVectorizer <max_gram_length = 1, min_gram_length = 1, max_skip_count = 0, mode = "TF",
                ngram_counts = [0], ngram_indexes = [0, 1, 2], pool_strings = ["sea", "a", "b"]> (t)
            y = Mul(c, scale)
        }}""").SerializeToString()


CASES = {
    "words": (counts('tokenexp = "[a-zA-Z0-9_]+"'), [[2, 2, 0], [0, 0, 0], [0, 0, 0], [2, 0, 0]]),
    "characters": (counts('tokenexp = "."'), [[0, 8, 2], [0, 2, 2], [0, 0, 0], [0, 2, 0]]),
    "separators": (counts('separators = [",", " "]'), [[2, 2, 0], [0, 0, 0], [0, 0, 0], [2, 0, 0]]),
    "case stays": (
        counts('tokenexp = "[a-z]+"', 'case_change_action = "NONE", is_case_sensitive = 1'),
        [[2, 2, 0], [0, 0, 0], [0, 0, 0], [2, 0, 0]],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_counts_of_words(case):
    data, want = CASES[case]
    session = compat.InferenceSession(data, providers=CPU)
    assert [(arg.name, arg.type, arg.shape) for arg in session.get_inputs()] == [
        ("text", "tensor(string)", ["rows", 1]),
        ("scale", "tensor(float)", [1]),
    ]
    for rows in (slice(None), slice(0, 1), slice(1, 3)):
        feed = {"text": np.array(TEXTS[rows], object)[:, None], "scale": np.array([2], "float32")}
        np.testing.assert_array_equal(session.run(None, feed)[0], np.array(want[rows], "float32"))


def test_marks_short_tokens_and_padding():
    data = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1, "ai.onnx.ml" : 3]>
        g (string[a, b] x) => (int64[a, b, c] y) {
            t = com.microsoft.Tokenizer <mark = 1, mincharnum = 2, pad_value = "#", separators = [" "]> (x)
            y = ai.onnx.ml.LabelEncoder <keys_strings = ["the", "#"], values_int64s = [1, 2], default_int64 = 9> (t)
        }""").SerializeToString()
    session = compat.InferenceSession(data, providers=CPU)
    texts = np.array([["the a sea", "b"], ["", "a  the"]], object)
    want = [[[9, 1, 9, 9], [9, 9, 2, 2]], [[9, 9, 2, 2], [9, 1, 9, 2]]]
    np.testing.assert_array_equal(session.run(None, {"x": texts})[0], want)


def parsed(text):
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>{text}')


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("split", "texts", "want"),
    [
        ('separators = ["(,|;)"]', ["a,b;c"], [["a", "b", "c"]]),
        ('separators = ["\\\\W+"]', ["a é, déf"], [["a", "d", "f"]]),
        ('separators = ["\\\\s+"]', ["b\u00a0c d"], [["b\u00a0c", "d"]]),
        ('separators = ["b", "a.c"]', ["xabcy"], [["xa", "cy"]]),
        ('separators = [" ", "^b"]', ["a bc"], [["a", "c"]]),
        ('separators = ["a|ab"]', ["xaby"], [["x", "y"]]),
        ('separators = ["."]', ["a\nb"], [["\n"]]),
        ('tokenexp = "a|ab"', ["abab a"], [["ab", "ab", "a"]]),
        ('tokenexp = "(?i)x|[a-z]+\\\\b|[0-9]+"', ["Xy abc1 de"], [["Xy", "1", "de"]]),
        ('tokenexp = "."', ["a\nb"], [["a", "\n", "b"]]),
        ('tokenexp = "[[:alpha:]_]+"', ["a_b é1 c"], [["a_b", "c"]]),
        ('tokenexp = "[a-z]*"', ["ab Xc", ""], [["ab", "c"], ["#", "#"]]),
    ],
)
def test_tokens_are_those_of_onnxruntime(split, texts, want):
    model = parsed(f"g (string[a] x) => (string[a, b] t) {{ t = com.microsoft.Tokenizer <{TOKENS}, {split}> (x) }}")
    evaluator = ReferenceEvaluator(model, new_ops=[Tokenizer])
    assert evaluator.run(None, {"x": np.array(texts, object)})[0].tolist() == want


def test_inputs_with_defaults_and_branches_that_text_comes_from():
    data = parsed("""g (string[a] x, int64[1] index, bool c) => (string[b] y) <int64[1] index = {0}> {
            one = Gather(x, index)
            two = If (c) <
                then_branch = yes () => (string[p] p) { p = Identity(one) },
                else_branch = no () => (string[q] q) { q = Concat <axis = 0> (one, one) }
            >
            y = StringNormalizer <case_change_action = "UPPER"> (two)
        }""").SerializeToString()
    session = compat.InferenceSession(data, providers=CPU)
    feed = {"x": np.array(["a", "b"], object), "c": np.array(True)}
    assert session.run(None, feed)[0].tolist() == ["A"]
    assert session.run(None, {**feed, "index": np.array([1]), "c": np.array(False)})[0].tolist() == ["B", "B"]


@pytest.mark.parametrize(
    ("attributes", "texts", "want"),
    [
        ('case_change_action = "UPPER"', ["straße", "ﬁé"], ["STRAßE", "ﬁÉ"]),
        ('case_change_action = "LOWER"', ["İI", "ΑΣ"], ["ii", "ασ"]),
        ('stopwords = ["The", "b"], is_case_sensitive = 1', ["The", "the", "B", "x"], ["the", "B", "x"]),
        ('stopwords = ["The", "b"], case_change_action = "UPPER"', ["The", "the", "B", "x"], ["X"]),
        ('stopwords = ["The", "b"]', ["b", "The"], [""]),
    ],
)
def test_text_may_be_the_result(attributes, texts, want):
    data = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 17]> g (string[a] x) => (string[b] y, int64[1] n) {{
            y = StringNormalizer <locale = "C.UTF-8", {attributes}> (x)
            n = Shape(y)
        }}""").SerializeToString()
    y, n = compat.InferenceSession(data, providers=CPU).run(None, {"x": np.array(texts, object)})
    assert list(y) == want and n.tolist() == [len(want)]


def test_steps_that_fail_on_a_text_of_one_letter():
    data = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 20]> g (string[a] x) => (string[b] y) <int64[1] i = {1}> {
            parts, number = StringSplit <delimiter = "-"> (x)
            second = Gather <axis = 1> (parts, i)
            flat = Squeeze(second, i)
            y = StringConcat(flat, flat)
        }""").SerializeToString()
    session = compat.InferenceSession(data, providers=CPU)
    assert session.run(None, {"x": np.array(["a-b", "c-d"], object)})[0].tolist() == ["bb", "dd"]
    with pytest.raises(Fail, match=r"StringConcat, Identity\) fail: IndexError"):
        session.run(None, {"x": np.array(["a"], object)})


def test_an_expression_that_is_not_one_is_refused_before_a_call():
    with pytest.raises(Fail, match=r"StringNormalizer, Tokenizer\).*unterminated"):
        compat.InferenceSession(counts('tokenexp = "[a-z"'), providers=CPU)
