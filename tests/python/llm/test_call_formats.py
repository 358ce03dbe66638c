"""Calls of tools in the formats of models: the same parts whether an answer comes whole or piece by piece."""

from __future__ import annotations

import json
import string

import numpy as np
import pytest

from llm.toy_model import ScriptModel, ToyCodec
from relax_hetero.llm import Engine, RequestError, SamplingParams, StructuredOutputs
from relax_hetero.llm.answer_parts import AnswerParser
from relax_hetero.llm.call_formats import FORMATS, REASONING, LarkWriter, format_of_template, parse_text
from relax_hetero.llm.server.tools import AnswerMessages
from relax_hetero.llm.special_tokens import SpecialTokens

ROWS = {row.name: row for row in FORMATS}
TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "options": {"type": "object"}},
        "required": ["city"],
    },
    "search.web": {"type": "object", "properties": {"query": {"type": "string"}, "tags": {"type": "array"}}},
    "now": {"type": "object", "properties": {}},
}
THINK = REASONING[0]


def random_text(generator: np.random.Generator) -> str:
    """A text with marks of the formats' syntaxes, but no tag of any."""
    words = ["Ärger", "a < b", "{x}", '"quoted"', "[1, 2]", "line\nbreak", "<tool", "back\\slash", "\U0001f600", "</"]
    return " ".join(generator.choice(words, generator.integers(1, 6)))


def random_arguments(generator: np.random.Generator, name: str) -> dict:
    values = {
        "city": random_text(generator),
        "days": int(generator.integers(-5, 50)),
        "options": {"deep": [{"a}": "]"}, None, 1.5, True], "text": random_text(generator)},
        "query": str(generator.choice(["12", "true", random_text(generator)])),
        "tags": [random_text(generator), []],
    }
    names = [each for each in TOOLS[name]["properties"] if generator.random() < 0.7 or each == "city"]
    return {each: values[each] for each in names}


def dumps(value, generator) -> str:
    indent = 2 if generator.random() < 0.3 else None
    return json.dumps(value, ensure_ascii=bool(generator.random() < 0.5), indent=indent)


def json_call(name, arguments, generator, key="arguments") -> str:
    pair = [f'"name": "{name}"', f'"{key}": {dumps(arguments, generator)}']
    return "{" + ", ".join(pair if generator.random() < 0.8 else pair[::-1]) + "}"


# Texts around calls as models write them: before all, before arguments, after them, between two, after all.
WRITTEN = {
    "hermes": ("", "", "<tool_call>\n", "\n</tool_call>", "\n", ""),
    "llama3": ("<|python_tag|>", "", "", "", "; ", ""),
    "mistral": ("[TOOL_CALLS][", "", "", "", ", ", "]"),
    "mistral_v11": ("", "", "[TOOL_CALLS]NAME[CALL_ID]abcdefghi[ARGS]", "", "", ""),
    "harmony": ("", "", "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", "<|call|>",
                "<|start|>assistant", ""),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
                    "\n```<｜tool▁call▁end｜>", "\n", "<｜tool▁calls▁end｜>"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", "", "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "",
                     "<｜tool▁calls▁end｜>"),
    "kimi": ("<|tool_calls_section_begin|>", "", "<|tool_call_begin|>functions.NAME:7<|tool_call_argument_begin|>",
             "<|tool_call_end|>", "", "<|tool_calls_section_end|>"),
    "glm": ("", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n", "<tool_call>NAME\n", "</tool_call>", "\n",
            ""),
    "qwen3_coder": ("", "<parameter=KEY>\nVALUE\n</parameter>\n", "<tool_call>\n<function=NAME>\n",
                    "</function>\n</tool_call>", "\n", ""),
}  # fmt: skip
IN_JSON = {"hermes": "arguments", "llama3": "parameters", "mistral": "arguments"}


def write_calls(name: str, calls: list, generator: np.random.Generator) -> str:
    """Calls as a model of this format writes them."""
    first, argument, before, after, between, last = WRITTEN[name]
    texts = []
    for call, arguments in calls:
        if name in IN_JSON:
            body = json_call(call, arguments, generator, IN_JSON[name])
        elif argument:
            pairs = [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in arguments.items()]
            body = "".join(argument.replace("KEY", key).replace("VALUE", value) for key, value in pairs)
        else:
            body = dumps(arguments, generator)
        texts.append(before.replace("NAME", call) + body + after)
    return first + between.join(texts) + last


def conversation(name: str, seed: int) -> tuple[str, str, str, list]:
    """An answer, and its reasoning, text and calls."""
    generator = np.random.default_rng(seed)
    reasoning = random_text(generator) if generator.random() < 0.5 else ""
    content = random_text(generator) if generator.random() < 0.5 or seed % 4 == 3 else ""
    names = generator.choice(list(TOOLS), 0 if seed % 4 == 3 else generator.integers(1, 4))
    calls = [(str(call), random_arguments(generator, str(call))) for call in names]
    if name == "llama3" and calls:  # calls are the whole answer
        content = ""
    written = write_calls(name, calls, generator) if calls else ""
    if name == "harmony":
        channel = "commentary" if calls else "final"
        parts = [f"<|channel|>analysis<|message|>{reasoning}<|end|>"] if reasoning else []
        parts += [f"<|channel|>{channel}<|message|>{content}{'<|end|>' if calls else ''}"] if content else []
        return "<|start|>assistant".join([*parts, *([written] if calls else [])]), reasoning, content, calls
    thoughts = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    return thoughts + content + ("\n" if content and calls else "") + written, reasoning, content, calls


def parser_of(name: str, **options) -> AnswerParser:
    row = ROWS[name]
    return AnswerParser(row.parse, None if row.reasoning else THINK, tools=TOOLS, **options)


def deltas_of(name: str, pieces: list[str], **options) -> tuple[dict, list[dict]]:
    """Message that a client puts together from deltas, and the deltas."""
    answer = AnswerMessages(parser_of(name, **options), ROWS[name])
    deltas = [answer.delta(piece, False) for piece in pieces] + [answer.delta("", True)]
    message: dict = {"content": "", "reasoning_content": "", "tool_calls": []}
    for delta in deltas:
        for key in ("content", "reasoning_content"):
            message[key] += delta.get(key) or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
                assert call["type"] == "function" and call["id"]
            message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message, deltas


def cut(text: str, generator: np.random.Generator) -> list[str]:
    """A text in pieces of 1 to 12 characters, as tokens have."""
    offsets = [0, *np.unique(generator.integers(0, len(text) + 1, max(1, len(text) // 4))).tolist(), len(text)]
    return [text[begin:end] for begin, end in zip(offsets, offsets[1:], strict=False)]


@pytest.mark.parametrize("name", ROWS)
def test_sixty_conversations(name):
    longest = 0
    for seed in range(60):
        text, reasoning, content, calls = conversation(name, seed)
        for pieces in ([text], list(text), cut(text, np.random.default_rng(seed))):
            message, deltas = deltas_of(name, pieces)
            assert (message["reasoning_content"], message["content"]) == (reasoning, content), (seed, text)
            found = [(call["name"], json.loads(call["arguments"])) for call in message["tool_calls"]]
            assert found == calls, (seed, text)
        whole = AnswerMessages(parser_of(name), ROWS[name]).message(text)
        assert [call["function"] for call in whole.get("tool_calls", [])] == message["tool_calls"]
        assert (whole["content"] or "") == content and (content or calls or whole["content"] == "")
        longest = max(longest, sum("tool_calls" in delta for delta in deltas))
        first, _ = deltas_of(name, [text], max_calls=1)
        assert len(first["tool_calls"]) == min(1, len(calls)) and first["content"] == content
    assert longest > 5  # arguments come as they are written


@pytest.mark.parametrize("name", ROWS)
def test_incomplete_and_damaged_answers_have_the_same_parts_in_any_pieces(name):
    generator = np.random.default_rng(5)
    for seed in range(20):
        text = conversation(name, seed)[0]
        begin, end = sorted(generator.integers(0, len(text) + 1, 2).tolist())
        inserted = text[:begin] + str(generator.choice(list(string.printable))) + text[begin:]
        for each in (text[:end], text[:begin] + text[end:], text[end:], inserted):
            whole, _ = deltas_of(name, [each])
            assert deltas_of(name, list(each))[0] == whole
            assert deltas_of(name, cut(each, generator))[0] == whole


@pytest.mark.parametrize(
    "name, text, content, calls",
    [
        ("hermes", "<tool_call> no JSON", "<tool_call> no JSON", []),
        ("hermes", '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        ("hermes", '<tool_call>{"name": "f"}</tool_call> then', "then", [("f", {})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', "", [("f", {"a": 1})]),
        ("llama3", '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
        ("llama3", '{"answer": [1]}', '{"answer": [1]}', []),
        ("llama3", '{"type": "function", "name": "now", "parameters": {}}', "", [("now", {})]),
        ("llama3", "<|python_tag|>print(1)", "print(1)", []),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}', "", [("f", {})]),
        ("mistral_v11", "[TOOL_CALLS]now{}", "", [("now", {})]),
        ("harmony", "plain", "plain", []),
        ("harmony", " to=functions.now<|channel|>commentary json<|message|>{}", "", [("now", {})]),
        ("glm", "<tool_call>now</tool_call>", "", [("now", {})]),
        ("qwen3_coder", "<function=now>\n</function>", "", [("now", {})]),
    ],
)  # fmt: skip
def test_forms_of_one_format(name, text, content, calls):
    for pieces in ([text], list(text)):
        message, _ = deltas_of(name, pieces)
        found = [(call["name"], json.loads(call["arguments"])) for call in message["tool_calls"]]
        assert (message["content"], found) == (content, calls)


@pytest.mark.parametrize("name", ROWS)
def test_a_call_without_a_name_is_text(name):
    """Its arguments are not those of the call before."""
    generator = np.random.default_rng(0)
    first = write_calls(name, [("now", {})], generator)
    text = first + write_calls(name, [("", {"query": "a"})], generator)
    for pieces in ([text], list(text)):
        parser = AnswerParser(ROWS[name].parse, tools=TOOLS)
        parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
        assert [part.text for part in parts if part.kind == "call"] == ["now"]
        assert json.loads("".join(part.text for part in parts if part.kind == "arguments")) == {}
        assert '"query"' in "".join(part.text for part in parts if part.kind == "content")


@pytest.mark.parametrize("is_reasoning", [False, True])
def test_reasoning(is_reasoning):
    begin = "" if is_reasoning else "<think>"
    for text, reasoning, content in (
        (f"{begin}\nWhy <think?\n\n</think>\n\n 1 < 2 \n", "Why <think?", "1 < 2 \n"),
        (f"{begin}cut off", "cut off", ""),
        (f"{begin}</think>a</think>", "", "a</think>"),
    ):
        for pieces in ([text], list(text)):
            parser = AnswerParser(parse_text, THINK, is_reasoning)
            parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
            texts = ["".join(part.text for part in parts if part.kind == kind) for kind in ("reasoning", "content")]
            assert texts == [reasoning, content]
    assert AnswerParser(parse_text, THINK).feed(" a <think>b</think>")[-1].text == " a <think>b</think>"


@pytest.mark.parametrize("visible", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_forced_calls(name, visible):
    """Models may write calls as they are used to, with reasoning before; where they do not, they have to."""
    pytest.importorskip("llguidance")
    jsonschema = pytest.importorskip("jsonschema")
    row, names = ROWS[name], ROWS[name].control if visible else ()
    properties = {"first": {"a": {"enum": [1, "x"]}}, "second": {"b": {"type": "string"}, "c": {"type": "boolean"}}}
    if not row.xml:  # texts without quotes have no length in the grammar
        properties["second"]["b"]["maxLength"] = 6
    tools = {
        call: {"type": "object", "properties": each, "required": list(each)[:1], "additionalProperties": False}
        for call, each in properties.items()
    }
    control = {each: 260 + index for index, each in enumerate(names)}

    class Codec(ToyCodec):
        """Bytes, and perhaps control tokens."""

        names = [str(token) for token in range(260)] + list(control)
        control_names = frozenset(control)

        def piece(self, token):
            return super().piece(token) if token < 257 else b""

    def answer(script: str, several: bool, seed: int = 0, free: bool = False) -> tuple[str, str, list]:
        parts = SpecialTokens(control).split(script)
        model = ScriptModel(vocabulary=280)
        model.begin = b"prompt"
        model.script = [token for part in parts for token in ([part] if isinstance(part, int) else part.encode())]
        prefix = LarkWriter(control).before_answer(row.reasoning or THINK, False, "")
        form = StructuredOutputs(grammar=row.grammar(tools, several, control, free), prefix=prefix)
        params = SamplingParams(seed=seed, max_tokens=500, visible_tokens=names, structured_outputs=form)
        with Engine(model, Codec()) as engine:
            request = engine.submit("prompt", params)
            written = request.result(60)
        message = AnswerMessages(AnswerParser(row.parse, None if row.reasoning else THINK, tools=tools), row).message(
            written
        )
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        if request.finish_reason == "stop":
            for each, arguments in calls:
                jsonschema.validate(json.loads(arguments), tools[each])
            assert free or (calls and message["content"] is None)
        return written, str(request.finish_reason), calls

    first, argument, before, after, between, last = WRITTEN[name]
    bodies = []
    for call, arguments in (("first", {"a": "x"}), ("second", {"b": "a < b", "c": True})):
        body = json.dumps(arguments)
        if name in IN_JSON:
            body = f'{{"name": "{call}", "{IN_JSON[name]}": {body}}}'
        elif argument:  # values other than texts are JSON
            pairs = [
                (key, value if call == "second" and key == "b" else json.dumps(value))
                for key, value in arguments.items()
            ]
            body = "".join(argument.replace("KEY", key).replace("VALUE", value) for key, value in pairs)
        after_call = "" if name == "harmony" else after  # the token ends the text
        bodies.append(
            before.replace("NAME", call).replace("[CALL_ID]abcdefghi", "").replace(":7", ":0") + body + after_call
        )
    begin, end = row.reasoning or THINK
    thoughts = f"{begin}A thought < {end}" + ("\n\n" if row.reasoning is None else "")
    first = "" if name == "llama3" else first
    for script in (first + bodies[0] + last, thoughts + first + bodies[1] + last):
        written, reason, calls = answer(script, several=False)
        assert (written, reason, len(calls)) == (script, "stop", 1)
    if row.between is not None:
        script = first + between.join(bodies) + last
        assert answer(script, several=True)[0].startswith(script)
        assert not answer(script, several=False)[0].startswith(script)
    if row.trigger:  # calls in free text
        script = "Text.\n" + first + between.join(bodies) + last
        for each, count in ((script, 2), (script + "\nMore.", 2), ("Text.", 0)):
            written, reason, calls = answer(each, True, free=True)
            assert (written, reason, len(calls)) == (each, "stop", count)
        written, _, calls = answer(script.replace("first", "third", 1), True, free=True)
        assert written.startswith("Text.") and all(call in tools for call, _ in calls)
    if not row.xml:
        script = first + bodies[1]
        complete = [answer(script[: script.index("a < b")], False, seed)[1] == "stop" for seed in range(4)]
        assert all(complete)


XML = {
    "$defs": {
        "level": {"enum": [1, 2]},
        "word": {"$ref": "#/$defs/words/$defs/word"},
        "words": {"$defs": {"word": {"type": "string", "maxLength": 9}}},
    },
    "type": "object",
    "properties": {
        "color": {"type": "string", "enum": ["red", "12"]},
        "kind": {"const": "a b"},
        "code": {"type": "string", "minLength": 3, "maxLength": 5},
        "unit": {"type": "string", "pattern": r"^[0-9]+(m/s|\$)$"},
        "day": {"type": "string", "format": "date"},
        "level": {"$ref": "#/$defs/level"},
        "word": {"allOf": [{"$ref": "#/$defs/word"}], "description": "a word"},
        "tag": {"enum": ["</parameter></arg_value>", "b"]},
        "any": True,
        "never": False,
    },
    "required": ["color", "kind", "code", "unit", "day", "level", "word", "tag", "any"],
}
VALUES = {"color": "12", "kind": "a b", "code": "</a", "unit": "20m/s", "day": "2024-02-29", "level": "2",
          "word": "12", "tag": "b", "any": "[1]"}  # fmt: skip


@pytest.mark.parametrize("name", ["glm", "qwen3_coder"])
def test_values_of_forced_calls_in_xml(name):
    pytest.importorskip("llguidance")
    jsonschema = pytest.importorskip("jsonschema")
    row, (_, argument, before, after, *_) = ROWS[name], WRITTEN[name]

    def call(values: dict) -> str:
        pairs = (argument.replace("KEY", key).replace("VALUE", value) for key, value in values.items())
        return before.replace("NAME", "tool") + "".join(pairs) + after

    def answer(schema: dict, script: str, seed: int) -> tuple[str, str | None]:
        model = ScriptModel(vocabulary=280)
        model.begin, model.script = b"prompt", list(script.encode())
        form = StructuredOutputs(grammar=row.grammar({"tool": schema}, False, {}))
        with Engine(model, ToyCodec()) as engine:
            request = engine.submit("prompt", SamplingParams(seed=seed, max_tokens=600, structured_outputs=form))
            return request.result(60), request.finish_reason

    wrong = {"color": "blue", "kind": "ab", "code": "toolong", "unit": "m/s", "day": "2024-13-01", "level": "3",
             "word": "1234567890", "tag": "</parameter></arg_value>"}  # fmt: skip
    complete = 0
    for seed, each in enumerate(["", *wrong]):
        script = call({**VALUES, each: wrong[each]} if each else VALUES)
        written, reason = answer(XML, script, seed)
        assert (written == script) == (not each)
        if reason == "stop":
            complete += 1
            parser = AnswerParser(row.parse, tools={"tool": XML})
            arguments = "".join(part.text for part in parser.feed(written) if part.kind == "arguments")
            jsonschema.validate(json.loads(arguments), XML, format_checker=jsonschema.FormatChecker())
    assert complete > 3
    anything = call({"any name": "1 < 2 </", "other": ""})
    assert answer({"type": "object"}, anything, 0) == (anything, "stop")
    cut = call({"a": "1</parameter></arg_value>2"})
    assert answer({"properties": {"a": {"type": "string"}}}, cut, 0)[0] != cut
    for schema in (
        {"properties": [1]},
        {"properties": {"a": 1}},
        {"properties": {}, "required": None},
        {"properties": {"a": False}, "required": ["a"]},
        {"properties": {"a": {"const": "</parameter></arg_value>"}}},
    ):
        with pytest.raises(RequestError, match="expected"):
            row.grammar({"tool": schema}, False, {})


def test_values_in_xml_have_a_type_of_the_schema():
    types = {
        "zip": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "size": {"enum": ["1", "2"]},
        "count": {"type": ["string", "integer"]},
        "code": {"$ref": "#/$defs/a~1b"},
        "codes": {"anyOf": [{"$ref": "#/$defs/a%7E1b"}, {"type": "null"}]},
        "loop": {"$ref": "#/properties/loop"},
        "alternatives": {"$ref": "#/$defs/alternatives"},
        "gone": {"$ref": "#/$defs/gone"},
        "other": {},
        "any": True,
    }
    definitions = {"a/b": {"type": "string"}, "alternatives": {"anyOf": [{"$ref": "#/$defs/alternatives"}]}}
    parser = AnswerParser(ROWS["glm"].parse, tools={"tool": {"properties": types, "$defs": definitions}})
    pairs = "".join(f"<arg_key>{key}</arg_key><arg_value>2</arg_value>" for key in types)
    arguments = "".join(part.text for part in parser.feed(f"<tool_call>tool{pairs}</tool_call>")[1:])
    texts = dict.fromkeys(("zip", "size", "code", "codes"), "2")
    assert json.loads(arguments) == dict.fromkeys(types, 2) | texts


@pytest.mark.parametrize(
    "source, name",
    [
        (r"""<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}""", "hermes"),
        (r"""'<tool_call>\n{"name": "' + tool_call.name""", "hermes"),
        (r"""<|start_header_id|> {"name": function name, "parameters": dictionary""", "llama3"),
        (r"""[TOOL_CALLS][""", "mistral"),
        (r"""[TOOL_CALLS]' + name + '[ARGS]""", "mistral_v11"),
        (r"""<|channel|>analysis<|message|>""", "harmony"),
        (r"""<｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\n```json\n""", "deepseek_v3"),
        (r"""<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>""", "deepseek_v31"),
        (r"""<tool_call>{function-name}\n<arg_key>""", "glm"),
        (r"""<tool_call>\n<function=example>""", "qwen3_coder"),
        (r"""<|tool_call_begin|>""", "kimi"),
        (r"""{{ messages }}""", None),
    ],
)
def test_the_format_of_a_template(source, name):
    row = format_of_template(source)
    assert (row and row.name) == name
