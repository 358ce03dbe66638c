"""Tools, reasoning and continued answers, as a client of OpenAI's sees them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

import pytest

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

from llm.server.running import running  # noqa: E402
from llm.toy_model import ScriptModel, ToyCodec  # noqa: E402
from relax_hetero.errors import HeteroError  # noqa: E402
from relax_hetero.llm import ChatTemplate, Engine, RequestError, StructuredOutputs  # noqa: E402
from relax_hetero.llm.server.api_errors import ApiError  # noqa: E402
from relax_hetero.llm.server.app import Settings  # noqa: E402
from relax_hetero.llm.server.chat_messages import Message, render_chat  # noqa: E402
from relax_hetero.llm.server.tools import AnswerFormats, Tool, ToolUse  # noqa: E402

# Tools, reasoning and results in the style of Qwen.
TEMPLATE = """\
{% if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}For each call write <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>
{% endif %}{% for m in messages %}<{{ m.role }}>
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content | trim }}\
{% for call in m.tool_calls %}<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>\
{% endfor %}
{% endfor %}{% if add_generation_prompt %}<assistant>
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""
BEGIN = b"<assistant>\n"
WEATHER = {"type": "function", "function": {"name": "weather", "description": "It rains.", "parameters": {
    "type": "object", "properties": {"city": {"enum": ["Bonn", "Ulm"]}}, "required": ["city"],
    "additionalProperties": False}}}  # fmt: skip
NOW = {"type": "function", "function": {"name": "now"}}
USER = [{"role": "user", "content": "Hi"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'


@pytest.fixture(scope="module")
def server():
    model = ScriptModel(slots=8, context=2048, pages=2000)
    model.begin = BEGIN
    with running(Engine(model, ToyCodec()), template=TEMPLATE) as started:
        yield started


@pytest.fixture
def ask(server):
    """Function that lets the model write a script, and returns the choice of the answer, streamed and not."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        def ask(script: str, messages=USER, **fields):
            server.engine.model.script = script
            fields = {"model": "toy", "messages": messages, "temperature": 0, "max_tokens": 300, **fields}
            whole = client.chat.completions.create(**fields).choices[0]
            merged: dict = {"content": "", "reasoning_content": "", "tool_calls": []}
            for part in client.chat.completions.create(**fields, stream=True):
                delta = part.choices[0].delta
                merged["content"] += delta.content or ""
                merged["reasoning_content"] += getattr(delta, "reasoning_content", "")
                for call in delta.tool_calls or ():
                    if call.id:
                        assert call.index == len(merged["tool_calls"]) and call.type == "function"
                        merged["tool_calls"].append([call.function.name, ""])
                    merged["tool_calls"][call.index][1] += call.function.arguments
            calls = [[call.function.name, call.function.arguments] for call in whole.message.tool_calls or ()]
            assert merged["tool_calls"] == calls and merged["content"] == (whole.message.content or "")
            assert merged["reasoning_content"] == getattr(whole.message, "reasoning_content", "")
            assert part.choices[0].finish_reason == whole.finish_reason
            return whole, calls

        yield ask


def test_calls(ask):
    whole, calls = ask("Let me see.\n" + CALL, tools=[WEATHER, NOW])
    assert calls == [["weather", '{"city": "Bonn"}']] and whole.finish_reason == "tool_calls"
    assert whole.message.content == "Let me see." and whole.message.tool_calls[0].id.startswith("call_")
    two = CALL + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    whole, calls = ask(two, tools=[WEATHER, NOW])
    assert [name for name, _ in calls] == ["weather", "now"] and whole.message.content is None
    _, calls = ask(two, tools=[WEATHER, NOW], parallel_tool_calls=False)
    assert [name for name, _ in calls] == ["weather"]
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        whole, calls = ask(CALL, **fields)
        assert (whole.message.content, calls, whole.finish_reason) == (CALL, [], "stop")
    whole, calls = ask(CALL, tools=[WEATHER], max_tokens=50)
    assert whole.finish_reason == "length" and calls[0][1] in '{"city": "Bonn"}'


def test_forced_calls(ask):
    """The model would write something else."""
    named = {"type": "function", "function": {"name": "weather"}}
    for choice, several in (("required", False), (named, True)):
        fields = {"tools": [WEATHER, NOW], "tool_choice": choice, "parallel_tool_calls": several}
        whole, calls = ask("<tool_call>I would rather not.", **fields)
        assert whole.finish_reason == "tool_calls" and len(calls) == 1
        assert choice == "required" or json.loads(calls[0][1])["city"] in ("Bonn", "Ulm")
        whole, calls = ask("<think>\nHm\n</think>\n\n" + CALL, **fields)
        assert (calls, whole.message.reasoning_content) == ([["weather", '{"city": "Bonn"}']], "Hm")


def test_tools_and_a_form(ask):
    """The form may be a text that would be a call."""
    whole, calls = ask(CALL, tools=[WEATHER], extra_body={"guided_choice": [CALL]})
    assert (whole.message.content, calls, whole.finish_reason) == (CALL, [], "stop")


def test_strict_tools(ask):
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    script = "Let me see.\n" + CALL.replace("Bonn", "Rome")
    whole, calls = ask(script, tools=[strict, NOW])
    assert whole.message.content == "Let me see." and json.loads(calls[0][1])["city"] in ("Bonn", "Ulm")
    assert ask(script, tools=[WEATHER, NOW])[1] == [["weather", '{"city": "Rome"}']]
    whole, calls = ask("Text < only.", tools=[strict])
    assert (whole.message.content, calls, whole.finish_reason) == ("Text < only.", [], "stop")
    now = '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>'  # not strict
    assert ask(now, tools=[strict, NOW])[1] == [["now", '{"a": 1}']]


def test_reasoning(ask):
    whole, _ = ask("<think>\nWhy?\n</think>\n\nSo.")
    assert (whole.message.reasoning_content, whole.message.content) == ("Why?", "So.")
    thinks = {"extra_body": {"enable_thinking": True}}
    script = "<think>\nWhy?\n</think>\n\nSo."  # the prompt has its begin
    whole, _ = ask(script, **thinks)
    assert (whole.message.reasoning_content, whole.message.content) == ("Why?", "So.")
    whole, _ = ask("<think>Why?</think>So.", extra_body={"reasoning_format": "none"})
    assert whole.message.content == "<think>Why?</think>So."
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["b"]}}}
    for fields in ({}, thinks):
        whole, _ = ask("<think>\nWhy?</think>\nSo.", response_format=schema, **fields)
        assert (whole.message.reasoning_content, whole.message.content) == ("Why?", '"b"')


def test_results_of_calls_and_reasoning_are_in_the_prompt(server, ask):
    whole, _ = ask(CALL, tools=[WEATHER])
    answered = [*USER, whole.message.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": whole.message.tool_calls[0].id, "content": "rain"}]  # fmt: skip
    prompts = []
    server.engine.model._on_step, on_step = lambda *step: prompts.append(step), server.engine.model._on_step
    whole, _ = ask("It rains.", answered, tools=[WEATHER])
    server.engine.model._on_step = on_step
    assert (whole.message.content, whole.message.tool_calls) == ("It rains.", None) and prompts
    messages = [Message.model_validate(message).flatten("messages") for message in answered]
    text = render_chat(ChatTemplate(TEMPLATE), messages, {})
    assert '<tool_call>weather {"city": "Bonn"}</tool_call>' in text and "<tool>\nrain" in text


def test_arguments_in_the_form_that_a_template_expects():
    calls = [{"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}]
    messages = [*USER, {"role": "assistant", "content": "", "tool_calls": calls}]
    loop = "{% for m in messages %}{{ m.role }} {{ m.content }}{% for c in m.tool_calls %}"
    for expression in ("c.function.arguments | tojson", "'' + c.function.arguments", "c.function.arguments"):
        template = ChatTemplate(f"{loop}{{{{ {expression} }}}}{{% endfor %}}{{% endfor %}}")
        assert render_chat(template, messages, {}).endswith('{"a": "b"}')
        empty = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
        both = [*messages, {"role": "assistant", "content": "", "tool_calls": empty}]
        assert render_chat(template, both, {}).endswith('{"a": "b"}assistant {}')
        assert render_chat(template, both[:1] + both[2:], {}).endswith("assistant {}")
    calls[0]["function"]["arguments"] = "no JSON"
    template = ChatTemplate(f"{loop}{{{{ c.function.arguments }}}}{{% endfor %}}{{% endfor %}}")
    assert render_chat(template, messages, {}).endswith("no JSON")


def test_answers_of_harmony():
    """The text that a prompt has begun goes on without marks; reasoning may be a part of the text."""
    formats = AnswerFormats(ChatTemplate("<|channel|><|message|>{{ messages }}"), {})
    answers = formats.answers(ToolUse(), "<|channel|>final<|message|>It will", "It will")
    assert answers.messages().message(" rain.")["content"] == " rain."
    called = formats.answers(ToolUse([Tool.model_validate(NOW)]), "<|channel|>final<|message|>It will", "It will")
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    for text in (f" rain.<|end|><|start|>assistant{call}<|call|>", " rain."):
        message = called.messages().message(text)
        assert message["content"] == " rain." and len(message.get("tool_calls", ())) == ("now" in text)
    with pytest.raises(ApiError, match="a text to continue"):
        formats.answers(ToolUse(forced=True), "prompt", "It will")
    form = answers.form(StructuredOutputs(choice=["a"]))
    assert form is not None and not form.prefix
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>So."
    for splits, content in ((True, "So."), (False, "Hm.So.")):
        message = formats.answers(ToolUse(), "prompt", None, splits).messages().message(text)
        assert message["content"] == content and message.get("reasoning_content") == ("Hm." if splits else None)


def test_continued_answers(ask):
    messages = [*USER, {"role": "assistant", "content": "It will "}]
    for fields in ({}, {"continue_final_message": True, "add_generation_prompt": False}):
        whole, _ = ask("It will rain.", messages, extra_body=fields)  # the script begins in the prompt
        assert whole.message.content == " rain."
    for fields in ({"add_generation_prompt": True}, {"continue_final_message": False}):
        whole, _ = ask("It will rain.", messages, extra_body=fields)
        assert whole.message.content == "It will rain."
    open_thought = [*USER, {"role": "assistant", "content": "<think>It will"}]
    whole, _ = ask("<think>It will</think>Rain.", open_thought)
    assert whole.message.content == "Rain." and not hasattr(whole.message, "reasoning_content")
    for blank in (" \n", [{"type": "text", "text": ""}]):
        whole, _ = ask("It will rain.", [*USER, {"role": "assistant", "content": blank}])
        assert whole.message.content == "It will rain."
    template = ChatTemplate("{% for m in messages %}{{ m.content }}<end>{% endfor %}", control_names=["<end>"])
    for text in ("a <end> b", "end", "e", "<", "Hi"):  # the mark of the end of a turn is no text
        prompt = render_chat(template, [*USER, {"role": "assistant", "content": f" {text}\n"}], {}, continues=True)
        assert prompt == f"Hi<end> {text}" and (prompt.marks or "<end>" not in text)
    template = ChatTemplate("{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    with pytest.raises(ApiError, match="changes the text"):
        render_chat(template, [*USER, {"role": "assistant", "content": "a"}], {}, continues=True)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "retrieval", "function": {"name": "a"}}]}, "tools.0.type"),
        ({"tools": [NOW, NOW]}, "found 'now' twice"),
        ({"tools": [NOW] * 129}, "found 129"),
        ({"tools": [NOW], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "expected it among the tools"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "b"}}}, "found 'b'"),
        ({"tools": [{**WEATHER, "function": {"name": "a", "parameters": {"type": "no"}}}], "tool_choice": "required"},
         "Invalid type: no"),
        ({"tools": [NOW], "tool_choice": "required", "response_format": {"type": "json_object"}},
         "tool_choice: found it with response_format"),
        ({"continue_final_message": True}, "found a last message of role 'user'"),
        ({"functions": [NOW["function"]]}, "use tools"),
        ({"reasoning_effort": "high"}, "reasoning_effort: found 'high', which the model's chat template does not know"),
    ],
)  # fmt: skip
def test_bad_fields(server, fields, message):
    for stream in (False, True):
        body = {"messages": USER, "stream": stream, **fields}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text


def test_templates_without_tools_or_a_known_format():
    body = {"messages": USER, "tools": [NOW]}
    for source, message in (("{{ messages }}", "leaves them out"), ("{{ tools }} {{ messages }}", "--tool-format")):
        with running(Engine(ScriptModel(), ToyCodec()), template=source) as server:
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
            assert answer.status_code == 400 and message in answer.json()["error"]["message"]
    with pytest.raises(HeteroError, match="found 'none', expected one of harmony"):
        Settings("toy", tool_format="none")
    broken = Tool.model_validate({"function": {"name": "a", "parameters": {"properties": {"b": {
        "type": "string", "pattern": 3}}}}})  # fmt: skip
    formats = AnswerFormats(ChatTemplate("{{ tools }} {{ messages }}"), {}, "glm")
    with pytest.raises(RequestError, match="tools: "):
        formats.answers(ToolUse([broken], forced=True), "prompt").form(None)
    formats = AnswerFormats(ChatTemplate("{{ tools }} {{ messages }}"), {}, "mistral")
    assert formats.calls is not None and len(formats.calls.new_id()) == 9


@pytest.mark.slow
def test_many_clients_with_schemas_tools_cancels_and_bad_bodies(server):
    """Nobody gets another's answer, and all requests end."""
    server.engine.model.script = CALL
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["b", "c"]}}}
    kinds = [
        {"tools": [WEATHER]},
        {"tools": [WEATHER], "tool_choice": "required"},
        {"response_format": schema},
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}},
        {},
    ]

    async def ask(client, index: int) -> None:
        kind = index % len(kinds)
        body = {"messages": USER, "temperature": 0, "max_tokens": 300, **kinds[kind], "stream": index % 2 == 0}
        if index % 5 == 4:  # leaves before the end
            with contextlib.suppress(httpx.TimeoutException):
                await client.post("/v1/chat/completions", json=body, timeout=0.01)
            return
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == (400 if kind in (3, 4) else 200), answer.text
        if answer.status_code == 200 and not body["stream"]:
            message = answer.json()["choices"][0]["message"]
            if kind < 2:
                assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Bonn"}'}
            else:
                assert message["content"] in (('"b"', '"c"') if kind == 2 else (CALL,))
        elif answer.status_code == 200:
            assert answer.text.endswith("data: [DONE]\n\n") and '"error"' not in answer.text

    async def ask_all() -> None:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
            await asyncio.gather(*(ask(client, index) for index in range(180)))

    asyncio.run(ask_all())
    deadline = time.monotonic() + 30
    while (statistics := server.engine.statistics()).running or statistics.waiting:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert statistics.finished["error"] == 0
