"""Structured output: complete texts have the form that was asked for, whatever the model would write."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

from llm.toy_model import EOS, LookAheadToyModel, ToyCodec, ToyModel, alone  # noqa: E402
from relax_hetero.encoding.token_masks import pack_mask, tokens_of_mask  # noqa: E402
from relax_hetero.llm import Engine, EngineClosedError, RequestError, SamplingParams, StructuredOutputs, sample  # noqa: E402
from relax_hetero.llm.sampling import History  # noqa: E402
from relax_hetero.llm.structured_output import Grammars  # noqa: E402

CODEC = ToyCodec()


def random_schema(generator: np.random.Generator, depth: int = 3) -> dict:
    """A schema in the shapes of public suites, whose texts are short."""
    low = int(generator.integers(-50, 50))
    simple = [
        {"type": "integer", "minimum": low, "maximum": low + int(generator.integers(0, 2000))},
        {"type": "number", "exclusiveMinimum": low, "maximum": low + 3},
        {"type": "string", "maxLength": 5},
        {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
        {"type": "string", "format": str(generator.choice(["date", "date-time", "uuid", "ipv4"]))},
        {"type": ["boolean", "null"]},
        {"enum": ["red", "green", 3, None, {"a": [1]}]},
        {"const": '\u00e9\\n"'},
    ]
    if depth == 0 or generator.random() < 0.3:
        return simple[generator.integers(len(simple))]

    def inner() -> dict:
        return random_schema(generator, depth - 1)

    names = [str(name) for name in generator.choice(["id", "name", "a b", "x/y", "items"], 3, replace=False)]
    nested = [
        {"type": "object", "properties": {name: inner() for name in names}, "required": names[:2],
         "additionalProperties": False},
        {"type": "object", "properties": {names[0]: inner()}, "required": names[:1], "additionalProperties": False},
        {"type": "array", "items": inner(), "minItems": 1, "maxItems": 3},
        {"type": "array", "prefixItems": [inner(), inner()], "items": False, "minItems": 2},
        {"anyOf": [inner(), inner()]},
        {"$defs": {"each": inner()}, "type": "array", "items": {"$ref": "#/$defs/each"}, "maxItems": 2},
        {"allOf": [{"type": "object", "properties": {"a": inner()}, "required": ["a"]}], "maxProperties": 1},
    ]  # fmt: skip
    schema = nested[generator.integers(len(nested))]
    # References are to the root of the schema.
    return schema if depth == 3 or "$defs" not in schema else schema["$defs"]["each"]


@pytest.mark.parametrize("batch", range(4))
def test_complete_answers_validate(batch):
    """Constrained and free requests share a batch; free ones get what they get alone."""
    schemas = [random_schema(np.random.default_rng(1000 * batch + index)) for index in range(30)]
    free = SamplingParams(temperature=0, max_tokens=60)
    model = (LookAheadToyModel if batch % 2 else ToyModel)(slots=8, pages=80)  # some are preempted
    model.masks_tokens = batch == 3
    complete = 0
    with Engine(model, CODEC) as engine:
        requests = []
        for index, schema in enumerate(schemas):
            form = StructuredOutputs(json=schema)
            params = SamplingParams(temperature=index % 2, seed=index, max_tokens=400, structured_outputs=form)
            requests.append((engine.submit("text", params), engine.submit([97, 98 + index % 9], free)))
        for index, (schema, (constrained, other)) in enumerate(zip(schemas, requests, strict=True)):
            text = constrained.result(60)
            if constrained.finish_reason == "stop":
                complete += 1
                jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
            tokens = alone(ToyModel(), [97, 98 + index % 9], 60)
            assert other.result(60) == CODEC.decode([token for token in tokens if token != EOS])
    assert complete >= 27


@pytest.mark.parametrize(
    "form, expression",
    [
        ({"regex": r"[0-9]{3}-(a|bc)+x"}, r"[0-9]{3}-(a|bc)+x"),
        ({"choice": ["yes", "no", 'may"be']}, 'yes|no|may"be'),
        ({"choice": [f"number {number}" for number in range(5000)]}, "number [0-9]+"),
        ({"grammar": 'root ::= "a" digit+ "z"\ndigit ::= [0-9]'}, "a[0-9]+z"),
        # Names that are the same in Lark, or that are its own; a text ends where no character of the set follows.
        (
            {
                "grammar": 'root ::= start " start " Start-1 start_1\nstart ::= [start"]+ # start\n'
                'Start-1 ::= "\\"" start\nstart_1 ::= "!"'
            },
            '[start"]+ start "[start"]+!',
        ),
        ({"grammar": 'start: "a" (B | "c") "z"\nB: /b{2,4}/'}, "a(b{2,4}|c)z"),
        ({"grammar": 'start[max_tokens=9]: "a ::= b"'}, "a ::= b"),
        ({"json": '{"enum": [1, 2]}'}, "1|2"),
        ({"json": {"type": "integer", "multipleOf": 1e6}}, "-?([1-9][0-9]*0{6}|0)"),
        ({"json_object": True}, r"(?s)\{.*\}"),
        ({"json": {"enum": ["order-20240101123456789012"]}}, '"order-20240101123456789012"'),
    ],
    ids=lambda value: str(value)[:60],
)
def test_forms(form, expression):
    with Engine(ToyModel(), CODEC) as engine:
        params = [
            SamplingParams(seed=seed, max_tokens=400, structured_outputs=StructuredOutputs(**form), ignore_eos=seed > 2)
            for seed in range(6)
        ]
        requests = [engine.submit("a", each) for each in params]
        texts = [request.result(60) for request in requests]
    ended = [text for text, request in zip(texts, requests, strict=True) if request.finish_reason == "stop"]
    assert ended and all(re.fullmatch(expression, text) for text in ended)


def test_long_chains_of_rules():
    """The package descends them recursively."""
    rules = [f"r{index}: r{index + 1}" for index in range(20_000)]
    definitions = {f"d{index}": {"type": "array", "items": {"anyOf": [{"const": 1}, {"$ref": f"#/$defs/d{index + 1}"}]}}
                   for index in range(3000)} | {"d3000": {"const": 2}}  # fmt: skip
    grammars = Grammars(CODEC, 300)
    grammar = "\n".join(["start: r0", *rules, 'r20000: "a"'])
    for form, first in (({"grammar": grammar}, "a"), ({"json": {"$defs": definitions, "$ref": "#/$defs/d0"}}, "[")):
        mask = grammars.constraint(StructuredOutputs(**form)).mask()
        assert [chr(token) for token in tokens_of_mask(mask, 300)] == [first]


@pytest.mark.parametrize(
    "form, message",
    [
        ({}, "found nothing"),
        ({"regex": "a", "choice": ["a"]}, "found regex and choice"),
        ({"json": 3}, "expected a JSON schema"),
        ({"choice": []}, "expected a list of texts"),
        ({"choice": "yes"}, "expected a list of texts"),
        ({"json": "["}, "Expecting value"),
        ({"json": "[1]"}, "expected an object"),
        ({"json": {"type": "nothing"}}, "Invalid type: nothing"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"$ref": "https://example.com/a"}}, "not present"),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 2}}, "minimum"),
        ({"json": {"examples": [{"multipleOf": 0}], "type": "integer", "multipleOf": 999983}}, "multiple is 999,983"),
        ({"json": {"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 9.91}]}}, "988,027"),
        ({"grammar": 'start: %json {"type": "integer", "multiple\\u004ff": 1048576}'}, "1,048,576"),
        ({"json": {"enum": [-(2**63) + 1]}}, "expected more than -9,223,372,036,854,775,808"),
        ({"grammar": 'start: %json {"type": "integer", "minimum": -0.93e19, "maximum": 3}'}, "expected more than"),
        ({"json": {"type": "string", "pattern": "("}}, "unclosed group"),
        ({"json": json.loads("[" * 150 + "1" + "]" * 150)[0]}, "JSON schema"),
        ({"json": '{"a":' * 400 + "1" + "}" * 400}, "recursion limit"),
        ({"grammar": "root ::= " + "(" * 5000 + ")" * 5000}, "recursion"),
        ({"regex": "a" * (1 << 20)}, "characters"),
        ({"grammar": "root ::= ("}, r"Expected \'\)\'"),
        ({"grammar": "root ::= nobody"}, "nobody"),
        ({"grammar": "start: nobody"}, "unknown name"),
        ({"grammar": "\x00"}, "structured_outputs"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bad_forms_are_refused_before_anything_runs(form, message):
    steps = []
    with Engine(ToyModel(on_step=lambda *step: steps.append(step)), CODEC) as engine:
        with pytest.raises(RequestError, match=message):
            engine.submit("a", SamplingParams(structured_outputs=StructuredOutputs(**form)))
    assert not steps


def test_an_expression_that_grows_too_large_ends_its_own_request():
    with Engine(ToyModel(), CODEC) as engine:
        form = StructuredOutputs(regex="(a|b)*" * 2000)
        large = engine.submit("a", SamplingParams(structured_outputs=form, max_tokens=60))
        other = engine.submit("b", SamplingParams(structured_outputs=StructuredOutputs(choice=["yes"])))
        assert other.result(60) == "yes"
        with pytest.raises(RequestError, match="too many expressions"):
            large.result(60)


def test_a_closed_engine():
    with Engine(ToyModel(), CODEC) as engine:
        pass
    with pytest.raises(EngineClosedError):
        engine.submit("a", SamplingParams(structured_outputs=StructuredOutputs(choice=["yes"])))


def test_masks_are_those_of_the_form():
    """Bytes of a token may end in the middle of a literal; control tokens are never text."""

    class Codec(ToyCodec):
        names = [f"<{token}>" for token in range(300)]
        control_names = frozenset({"<299>"})

        def piece(self, token):
            return {297: b"ye", 298: b"s!", 299: b""}.get(token, super().piece(token))

    grammars = Grammars(Codec(), 310)
    constraint = grammars.constraint(StructuredOutputs(choice=["yes!", "yet", "you"]))

    def allowed():
        return tokens_of_mask(constraint.mask(), 310).tolist()

    assert allowed() == [ord("y"), 297]
    assert not constraint.advance(297) and allowed() == [ord("s"), ord("t"), 298]
    assert constraint.advance(298)
    with pytest.raises(RequestError, match="structured_outputs"):
        grammars.constraint(StructuredOutputs(choice=["yes!"])).advance(EOS)
    grammars.close()


def test_a_mask_and_filters():
    logits = np.arange(8, dtype=np.float32)
    mask = pack_mask(np.isin(np.arange(8), [1, 3]))
    for options in (
        {},
        {"top_k": 1},
        {"top_p": 0.5},
        {"min_p": 0.9},
        {"logit_bias": {7: 50.0}},
        {"presence_penalty": 1},
    ):
        for temperature in (0, 5):
            params = SamplingParams(temperature=temperature, **options)
            tokens = {sample(logits, params, np.random.default_rng(i), History([7]), mask)[0] for i in range(50)}
            greedy = temperature == 0 or options.keys() & {"top_k", "min_p"}
            assert tokens == {3} if greedy else tokens <= {1, 3}


def test_masks_of_many_tokens_sample_as_those_of_few():
    """Logits without the tokens that are not allowed, whichever way they are removed."""
    generator, size = np.random.default_rng(0), 5000
    logits = generator.standard_normal(size).astype("float32")
    for share in (0.002, 0.3, 0.999):
        allowed = generator.random(size) < share
        lowest = np.where(allowed, logits, np.float32(-1e30))
        for options in ({}, {"top_k": 40}, {"top_k": 9}, {"top_p": 0.7}, {"min_p": 0.05}):
            for temperature in (0, 0.7):
                params = SamplingParams(temperature=temperature, **options)
                one = [
                    sample(logits, params, np.random.default_rng(i), History(), pack_mask(allowed)) for i in range(30)
                ]
                two = [sample(lowest, params, np.random.default_rng(i), History()) for i in range(30)]
                assert [token for token, _ in one] == [token for token, _ in two]


def test_min_tokens():
    """Neither the end nor a stop string ends a text before; later ones do."""
    prompt = next(prompt for prompt in range(97, 123) if 2 < len(alone(ToyModel(), [prompt], 60)) < 40)
    with Engine(ToyModel(), CODEC) as engine:
        count = len(alone(ToyModel(), [prompt], 60))
        request = engine.submit([prompt], SamplingParams(temperature=0, max_tokens=60, min_tokens=count + 5))
        request.result(60)
        assert request.usage.completion_tokens > count
        start = CODEC.decode(alone(ToyModel(), [prompt], 60))[:2]
        params = SamplingParams(temperature=0, max_tokens=60, min_tokens=2, stop=(start[0],))
        request = engine.submit([prompt], params)
        assert request.result(60).startswith(start)
        form = StructuredOutputs(choice=["a"])
        request = engine.submit([prompt], SamplingParams(min_tokens=9, structured_outputs=form))
        assert (request.result(60), request.finish_reason) == ("a", "stop")
