"""Formats in which models write calls of tools: rows with the texts around a call, and routines that parse them."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from ..errors import HeteroError
from .answer_parts import AnswerParser, Reader, Reasoning, Routine, call_object
from .errors import RequestError
from .special_tokens import SpecialTokens
from .structured_output import JSON_OPTIONS, pattern_rule

Schemas = Mapping[str, Mapping[str, Any]]
ANY_TEXT = r"/(?s:.*)/"  # terminal of Lark
_ALPHANUMERIC = string.ascii_letters + string.digits
_MAX_REFERENCES = 16  # number of references to follow from one schema to the next: some name themselves


@dataclass(frozen=True)
class CallFormat:
    """Format of calls."""

    name: str  # name, for options
    texts: tuple[str, ...]  # texts that are all in the chat templates of models with this format
    parse: Callable[[Reader, AnswerParser], Routine[None]]  # routine that parses an answer after the reasoning
    # Texts before and after the arguments of a call, between two, before all calls and after all, in calls that the
    # server forces; ``{name}`` is the tool. No calls follow the first if `between` is None.
    before: str
    after: str = ""
    between: str | None = None
    first: str = ""
    last: str = ""
    control: tuple[str, ...] = ()  # names of control tokens that `parse` has to see
    # Texts before the name of an argument, between name and value, and after the value; empty for JSON arguments.
    xml: tuple[str, ...] = ()
    id_length: int = 0  # number of characters of the identifier of a call; 0 for OpenAI's form
    # Texts around the reasoning, which `parse` handles; None if it is as in `REASONING`.
    reasoning: Reasoning | None = None
    content: str = ""  # text before an answer that is not a call
    trigger: str = ""  # beginning of `first` or `before` that no text contains; empty if there is none

    def new_id(self) -> str:
        """Identifier of a call."""
        if not self.id_length:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(self.id_length))

    def grammar(
        self,
        tools: Schemas,  # JSON schemas of the arguments of the tools that may be called, by name
        several: bool,  # whether further calls may follow the first
        control: Mapping[str, int],  # control tokens of the model
        free: bool = False,  # whether text may precede and follow calls, which begin with `trigger`
    ) -> str:
        """Grammar of one call or `several`, in Lark."""
        lark = LarkWriter(control)
        first, before, last = self.first, self.before, self.last
        if free and not first.startswith(self.trigger):  # texts around calls are free, too
            first, before, last, several = "", before.removeprefix(self.trigger), "", False
        elif free:
            first = first.removeprefix(self.trigger)
        more = f" ({lark.text(self.between)} call)*" if several and self.between is not None else ""
        rules = [f"{'calls' if free else 'start'}: {lark.text(first)} call{more} {lark.text(last)}"]
        if free:
            rules += lark.free_text("(before calls)*", self.trigger, self.control)
        rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
        for index, (name, schema) in enumerate(tools.items()):
            start, end = (lark.text(text.replace("{name}", name)) for text in (before, self.after))
            rules.append(f"call_{index}: {start} arguments_{index} {end}")
            rules += (
                lark.xml_arguments(index, schema, self.xml) if self.xml else [f"arguments_{index}: {_json(schema)}"]
            )
        return "\n".join(rules)


class LarkWriter:
    """Writes rules of Lark grammars. `control`: control tokens of the model."""

    def __init__(self, control: Mapping[str, int]) -> None:
        self.control, self._tokens = control, SpecialTokens(control)

    def text(self, text: str) -> str:
        """Terminals of a text."""
        parts = self._tokens.split(text)
        return " ".join(f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in parts)

    def text_until(self, rule: str, end: str, form: str = ANY_TEXT) -> str:
        """Rule of any text, or of one of a `form` (a terminal), up to the first `end`, whose tag is not in the text."""
        terminals = self.text(end)
        if terminals.startswith("<"):  # a control token, which no text contains
            return f"{rule}: {form} {terminals}"
        if form == ANY_TEXT and end == _tag(end):
            return f"{rule}[suffix={json.dumps(end)}]: {ANY_TEXT}"
        # The first end is the end: forms with a least length might continue after it.
        name, first = rule.upper(), f"/(?s:.*)/ {json.dumps(_tag(end))} /(?s:.*)/"
        return f"{rule}[suffix={json.dumps(end)}]: {name}\n{name}: {form} & ~({first})"

    def free_text(self, calls: str, trigger: str, control: Iterable[str]) -> list[str]:
        """Rules ``start`` and ``before``: `calls`, and any text besides; ``before`` ends with `trigger`."""
        others = " | ".join(self.text(name) for name in control if name in self.control and name != trigger)
        pieces = f"({ANY_TEXT} ({others}))* " if others else ""
        mark = self.text_until("mark", trigger)
        return [f"start: {calls} {pieces}{ANY_TEXT}", f"before: {pieces}mark", mark]

    def before_answer(self, reasoning: Reasoning | None, is_reasoning: bool, content: str) -> str:
        """Rules of `StructuredOutputs.prefix`: the reasoning, if the prompt has begun or the model begins it.

        `reasoning`: texts around the reasoning; `is_reasoning`: whether the prompt has begun the reasoning; `content`:
        text before the answer.
        """
        if reasoning is None:
            return f"prefix: {self.text(content)}" if content else ""
        thoughts = "thoughts" if is_reasoning else f"({self.text(reasoning.begin)} thoughts)?"
        rule = self.text_until("thoughts", reasoning.end)
        blanks = "" if content else r"/\n{0,2}/"
        return f"prefix: {thoughts} {blanks} {self.text(content)}\n{rule}"

    def xml_arguments(self, index: int, schema: Mapping[str, Any], xml: tuple[str, ...]) -> list[str]:
        """Rules of the arguments of a call in the order of the schema; optional ones may be left out."""
        begin, middle, end = xml
        rule = f"arguments_{index}"
        if "properties" not in schema and schema.get("additionalProperties") is not False:
            pair = [self.text_until(f"name_{index}", middle), self.text_until(f"value_{index}", end)]
            return [f"{rule}: ({self.text(begin)} name_{index} value_{index})*", *pair]
        properties, required = _checked(schema)
        definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        rules, names = [], []
        for number, (name, stated) in enumerate(properties.items()):
            value = _resolved(stated, schema)
            if value is False:
                if name in required:
                    raise RequestError(f"found the schema false of {name!r}, which is required, expected another")
                continue
            rule = f"argument_{index}_{number}"
            names.append(rule if name in required else f"{rule}?")
            before, texts = self.text(begin + name + middle), _texts_of(value)
            written = [text for text in texts if _tag(end) not in text]
            if texts and not written:
                raise RequestError(f"found only values with {_tag(end)} for {name!r}, expected one that can be written")
            if texts:
                rules.append(f"{rule}: {before} ({' | '.join(map(json.dumps, written))}) {self.text(end)}")
            elif _is_text(value):
                rules.append(f"{rule}: {before} text_{rule}")
                rules.append(self.text_until(f"text_{rule}", end, _text_form(value)))
            else:
                rules.append(f"{rule}: {before} {_json({**value, **definitions})} {self.text(end)}")
        return [f"arguments_{index}: {' '.join(names) or json.dumps('')}", *rules]


def _tag(text: str) -> str:
    """Tag in the text after a value, without line breaks: the parser looks for it."""
    return text.strip().partition("\n")[0]


def _checked(schema: Mapping[str, Any]) -> tuple[Mapping[str, Mapping[str, Any] | bool], Collection[str]]:
    """Properties and required names of a schema, if they have the types of these."""
    properties, required = schema.get("properties", {}), schema.get("required", ())
    if not isinstance(properties, Mapping) or not all(
        isinstance(each, (Mapping, bool)) for each in properties.values()
    ):
        raise RequestError(f"found the properties {properties!r:.100}, expected an object of schemas")
    if not isinstance(required, Sequence) or not all(isinstance(each, str) for each in required):
        raise RequestError(f"found {required!r:.100} as required, expected a list of names")
    return properties, required


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Schema with the references at its top, and an ``allOf`` of one, replaced by what they name; true is {}."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            break
        reference, parts = schema.get("$ref"), schema.get("allOf")
        if isinstance(reference, str):
            target, name = _named(reference, root), "$ref"
        elif isinstance(parts, Sequence) and len(parts) == 1:
            target, name = parts[0], "allOf"
        else:
            break
        if not isinstance(target, Mapping):
            return schema if target is None or target is True else target
        schema = {**target, **{key: value for key, value in schema.items() if key != name}}
    return {} if schema is True else schema


def _named(reference: str, root: Any) -> Any:
    """Schema that a reference in the same document names; None if there is none."""
    pointer, *parts = unquote(reference).split("/")
    for part in parts if pointer == "#" else ("",):
        part = part.replace("~1", "/").replace("~0", "~")
        root = root.get(part) if isinstance(root, Mapping) else None
    return root


def _json(schema: Mapping[str, Any]) -> str:
    """Rule of a JSON text; keywords that are not implemented do not restrict it."""
    return "%json " + json.dumps({**schema, "x-guidance": {**JSON_OPTIONS, "lenient": True}})


def _is_text(schema: Any) -> bool:
    """True if a schema allows only texts, which XML formats write without quotes."""
    return isinstance(schema, Mapping) and schema.get("type") in ("string", ["string"])


def _texts_of(schema: Mapping[str, Any]) -> list[str]:
    """Texts that a schema allows, if it lists them and nothing else."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return []
    texts = [value for value in values if isinstance(value, str)]
    return texts if _is_text(schema) or len(texts) == len(values) else []


def _text_form(schema: Mapping[str, Any]) -> str:
    """Terminal of a text with the pattern, format and length of a schema; unknown formats do not restrict it."""
    forms = []
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength", "")
    if shortest or longest != "":
        forms.append(f"/(?s:.{{{shortest},{longest}}})/")
    if "pattern" in schema:
        forms.append(pattern_rule(schema["pattern"]))
    forms += [f"/{_FORMATS[name]}/" for name in [schema.get("format")] if name in _FORMATS]
    return " & ".join(forms) or ANY_TEXT


def _admits(schema: Any, value: Any, root: Mapping[str, Any], depth: int = 0) -> bool:
    """True unless the alternatives, values or types of a schema in the document `root` exclude a value."""
    schema = _resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
        return True
    if isinstance(alternatives := schema.get("anyOf", schema.get("oneOf")), list):
        return any(_admits(each, value, root, depth + 1) for each in alternatives)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return any(type(each) is type(value) and each == value for each in values)
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    return types == [None] or not _TYPES[type(value)].isdisjoint(each for each in types if isinstance(each, str))


_DATE = r"[0-9]{4}-((0[1-9]|1[0-2])-(0[1-9]|[12][0-9])|(0[13-9]|1[0-2])-30|(0[13578]|1[02])-31)"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
_ZONE = r"(\.[0-9]{1,9})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME + _ZONE,
    "date-time": f"{_DATE}T{_TIME}{_ZONE}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
}
"""Regular expressions of texts by ``format``."""
_TYPES = {
    str: {"string"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    type(None): {"null"},
    list: {"array"},
    dict: {"object"},
}
"""Names in schemas of the types of JSON values."""


def parse_text(reader: Reader, answer: AnswerParser) -> Routine[None]:
    """Parse an answer without calls."""
    yield from reader.until((), answer.content)


def _parse_hermes(reader: Reader, answer: AnswerParser) -> Routine[None]:
    while (yield from reader.until(("<tool_call>",), answer.content))[1]:
        if (yield from call_object(reader, answer)):
            yield from reader.literal("</tool_call>")
        else:
            answer.content("<tool_call>")


def _parse_llama3(reader: Reader, answer: AnswerParser) -> Routine[None]:
    yield from reader.literal("<|python_tag|>")
    while True:
        while (yield from call_object(reader, answer, known_only=True)):
            yield from reader.literal(";")
        if not (yield from reader.until(("<|python_tag|>",), answer.content))[1]:
            return


def _parse_mistral(reader: Reader, answer: AnswerParser) -> Routine[None]:
    while (yield from reader.until(("[TOOL_CALLS]",), answer.content))[1]:
        following = yield from reader.peek()
        if following == "{":
            yield from call_object(reader, answer)
        elif following == "[":
            yield from reader.literal("[")
            while (yield from call_object(reader, answer)):
                yield from reader.literal(",")
            yield from reader.literal("]")
        else:
            name, stop = yield from reader.until(("[ARGS]", "[CALL_ID]", "{"))
            if stop == "[CALL_ID]":
                yield from reader.until(("[ARGS]",))
            reader.position -= stop == "{"
            answer.call(name.strip())
            yield from reader.json_text(answer.arguments)


def _parse_harmony(reader: Reader, answer: AnswerParser) -> Routine[None]:
    while True:
        header, stop = yield from reader.until(("<|message|>",))
        if not stop:  # the model does not keep to its format
            answer.content("" if header.startswith(("<|channel|>", "<|start|>")) else header)
            return
        recipient = re.search(r"to=(?:functions\.)?([^\s<]*)", header)
        sink = answer.reasoning if "<|channel|>analysis" in header else answer.content
        if recipient is not None and recipient[1] not in ("user", "assistant"):
            answer.call(recipient[1])
            sink = answer.arguments
        yield from reader.until(("<|end|>", "<|call|>", "<|return|>"), sink)


def _parse_sections(begin: str, separator: str, end: str, others: tuple[str, ...]) -> Any:
    """Routine for calls of a name, a separator and JSON between `begin` and `end`; `others` are left out."""

    def parse(reader: Reader, answer: AnswerParser) -> Routine[None]:
        while stop := (yield from reader.until((begin, *others), answer.content))[1]:
            if stop != begin:
                continue
            name = (yield from reader.until((separator,)))[0]
            if (yield from reader.peek()) != "{":  # the name is after the kind, and the arguments are marked as code
                name = (yield from reader.until(("\n",)))[0]
                yield from reader.literal("```json")
            answer.call(re.sub(r"^functions\.|:\d+$", "", name.strip()))
            yield from reader.json_text(answer.arguments)
            yield from reader.until((end,))

    return parse


def _parse_glm(reader: Reader, answer: AnswerParser) -> Routine[None]:
    while (yield from reader.until(("<tool_call>",), answer.content))[1]:
        name, stop = yield from reader.until(("<arg_key>", "</tool_call>"))
        arguments = _XmlArguments(answer, name.strip())
        while stop == "<arg_key>":
            key = (yield from reader.until(("</arg_key>",)))[0]
            yield from reader.until(("<arg_value>",))
            value, is_complete = yield from reader.until(("</arg_value>",))
            if is_complete:
                arguments.add(key.strip(), value)
            _, stop = yield from reader.until(("<arg_key>", "</tool_call>"))
        if stop:
            arguments.close()


def _parse_qwen3_coder(reader: Reader, answer: AnswerParser) -> Routine[None]:
    while (yield from reader.until(("<tool_call>", "<function="), answer.content))[1]:
        yield from reader.literal("<function=")
        name = (yield from reader.until((">",)))[0]
        arguments = _XmlArguments(answer, name.strip())
        _, stop = yield from reader.until(("<parameter=", "</function>"))
        while stop == "<parameter=":
            key = (yield from reader.until((">",)))[0]
            value, is_complete = yield from reader.until(("</parameter>",))
            if is_complete:
                arguments.add(key.strip(), value.removeprefix("\n").removesuffix("\n"))
            _, stop = yield from reader.until(("<parameter=", "</function>"))
        if stop:
            arguments.close()
        yield from reader.literal("</tool_call>")


class _XmlArguments:
    """Arguments of a call that come one by one, and become a JSON object."""

    def __init__(self, answer: AnswerParser, name: str) -> None:
        self._answer, self._separator = answer, "{"
        self._schema = answer.tools.get(name, {})
        properties = self._schema.get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        answer.call(name)

    def add(self, name: str, text: str) -> None:
        """Append an argument: JSON, unless its schema or its form says that it is text."""
        value: Any = text
        schema = _resolved(self._properties.get(name), self._schema)
        if not _is_text(schema):
            try:
                parsed = json.loads(text)
                value = parsed if _admits(schema, parsed, self._schema) else text
            except (ValueError, RecursionError):
                pass
        self._answer.arguments(f"{self._separator}{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}")
        self._separator = ", "

    def close(self) -> None:
        """End the object."""
        self._answer.arguments("{}" if self._separator == "{" else "}")


_HARMONY_TOKENS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>")
_DEEPSEEK = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_KIMI = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
_KIMI_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")

FORMATS = (
    CallFormat(
        "harmony", ("<|channel|>", "<|message|>"), _parse_harmony,
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", control=_HARMONY_TOKENS,
        reasoning=Reasoning("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        content="<|channel|>final<|message|>",
    ),
    CallFormat(
        "deepseek_v3", ("<｜tool▁call▁begin｜>", "```json"), _parse_sections(*_DEEPSEEK, _DEEPSEEK_SECTION),
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n", "\n```<｜tool▁call▁end｜>", "\n",
        *_DEEPSEEK_SECTION, control=(*_DEEPSEEK, *_DEEPSEEK_SECTION), trigger=_DEEPSEEK[0],
    ),
    CallFormat(
        "deepseek_v31", ("<｜tool▁call▁begin｜>",), _parse_sections(*_DEEPSEEK, _DEEPSEEK_SECTION),
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "",
        *_DEEPSEEK_SECTION, control=(*_DEEPSEEK, *_DEEPSEEK_SECTION), trigger=_DEEPSEEK[0],
    ),
    CallFormat(
        "kimi", ("<|tool_call_begin|>",), _parse_sections(*_KIMI, _KIMI_SECTION),
        "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>", "<|tool_call_end|>", "",
        *_KIMI_SECTION, control=(*_KIMI, *_KIMI_SECTION), trigger=_KIMI[0],
    ),
    CallFormat(
        "mistral_v11", ("[TOOL_CALLS]", "[ARGS]"), _parse_mistral, "[TOOL_CALLS]{name}[ARGS]", between="",
        control=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), id_length=9, trigger="[TOOL_CALLS]",
    ),
    CallFormat(
        "mistral", ("[TOOL_CALLS]",), _parse_mistral, '{"name": "{name}", "arguments": ', "}", ", ",
        "[TOOL_CALLS][", "]", control=("[TOOL_CALLS]",), id_length=9, trigger="[TOOL_CALLS]",
    ),
    CallFormat(
        "glm", ("<tool_call>", "<arg_key>"), _parse_glm, "<tool_call>{name}\n", "</tool_call>", "\n",
        control=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        xml=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"), trigger="<tool_call>",
    ),
    CallFormat(
        "qwen3_coder", ("<tool_call>", "<function="), _parse_qwen3_coder, "<tool_call>\n<function={name}>\n",
        "</function>\n</tool_call>", "\n", control=("<tool_call>", "</tool_call>"),
        xml=("<parameter=", ">\n", "\n</parameter>\n"), trigger="<tool_call>",
    ),
    CallFormat(
        "hermes", ("<tool_call>", '"name"'), _parse_hermes,
        '<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", "\n",
        control=("<tool_call>", "</tool_call>"), trigger="<tool_call>",
    ),
    CallFormat(
        "llama3", ("<|start_header_id|>", '"parameters": '), _parse_llama3, '{"name": "{name}", "parameters": ', "}",
        control=("<|python_tag|>",),
    ),
)  # fmt: skip
"""Formats; the first one whose texts a template has is the template's."""

REASONING = (Reasoning("<think>", "</think>"), Reasoning("[THINK]", "[/THINK]"))
"""Texts around reasoning; a template with the second one has it."""


def format_named(name: str) -> CallFormat:
    """Format of a name. `name`: name of a row of `FORMATS`. Raises HeteroError if there is none."""
    row = next((row for row in FORMATS if row.name == name), None)
    if row is None:
        names = ", ".join(row.name for row in FORMATS)
        raise HeteroError(f"tool_format: found {name!r}, expected one of {names}")
    return row


def format_of_template(source: str) -> CallFormat | None:
    """Format of calls that a chat template describes or writes, if it is known."""
    unquoted = source.replace('\\"', '"')
    return next((row for row in FORMATS if all(text in unquoted for text in row.texts)), None)


def reasoning_of_template(source: str) -> Reasoning | None:
    """Texts around the reasoning in answers, if a chat template knows of one."""
    return next((row for row in REASONING if row.end in source), None)
