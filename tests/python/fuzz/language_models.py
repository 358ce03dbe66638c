"""Damaged language models as attacks: GGUF files, folders of Hugging Face, and forms of structured output and tools."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import relax_hetero as rh
from llm.gguf_files import MODELS, write_gguf
from llm.hub_files import write_folder
from llm.toy_model import ToyCodec
from relax_hetero.encoding.token_masks import tokens_of_mask
from relax_hetero.frontend.gguf.file import GgufFile, read_gguf
from relax_hetero.llm import ChatTemplate, StructuredOutputs, Tokenizer, load_tokenizer
from relax_hetero.llm.call_formats import FORMATS
from relax_hetero.llm.structured_output import Grammars, package_errors

from .file_attacks import ODD_VALUES, damaged
from .harness import REFUSED, RIGHT, Outcome

_FILES = ("llama", "gpt-oss", "deepseek2", "gemma3", "qwen3moe")
_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{% if loop.last %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ strftime_now('%d %b') }}"
)
_WORDS = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "</s>": 3}, "merges": [["a", "b"]], "unk_token": "a"}
_END = {"id": 3, "content": "</s>", "special": True} | dict.fromkeys(
    ("single_word", "lstrip", "rstrip", "normalized"), False
)
_TEXTS = {
    "tokenizer.json": json.dumps(
        {
            "version": "1.0",
            "model": _WORDS,
            "added_tokens": [_END],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        }
    ),
    "tokenizer_config.json": json.dumps(
        {"eos_token": {"content": "</s>"}, "added_tokens_decoder": {"3": {"content": "</s>", "special": True}}}
    ),
    "generation_config.json": json.dumps({"eos_token_id": [3], "temperature": 0.7, "top_k": 20, "top_p": 0.9}),
    "chat_template.jinja": _TEMPLATE,
}
"""Files of a folder besides the model's configuration and weights."""
_SCHEMA: dict[str, Any] = {
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "n": {"const": 1}}}},
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20, "pattern": "^[A-Z][a-z]*$"},
        "day": {"type": "string", "format": "date"},
        "size": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 100, "multipleOf": 0.5},
        "tags": {"type": "array", "items": {"enum": ["x", 2, None]}, "minItems": 1, "maxItems": 4},
        "tree": {"$ref": "#/$defs/node"},
        "either": {"anyOf": [{"type": "integer"}, {"allOf": [{"type": "boolean"}]}]},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
_FORMS = {
    "regex": r"(a|b)+[0-9]{2,5}(\.\d+)?[^\s\"]*\p{L}?",
    "grammar": 'root ::= item ("," item)*\nitem ::= [a-z]+ | "\\"" [^"]{0,9} "\\"" # names\n',
    "lark": 'start: item ("," item)*\nitem: /[a-z]+/ | NUMBER\nNUMBER: /[0-9]+/\n%ignore / /\n',
}


@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="relax_hetero_fuzz_"))


@functools.cache
def _gguf(name: str) -> tuple[Path, int]:
    """A good file, and the number of its bytes before the weights."""
    import gguf

    path = write_gguf(_folder() / f"{name}.gguf", MODELS[name], "Q8_0", chat_template=_TEMPLATE)
    rh.from_gguf(path, context=64)
    return path, int(gguf.GGUFReader(path).data_offset)


@functools.cache
def _hub() -> dict[str, bytes]:
    """The files of a good folder."""
    folder = write_folder("qwen3", _folder())[1]
    for name, text in _TEXTS.items():
        (folder / name).write_text(text)
    _use(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _use(path: Path | GgufFile) -> None:
    """Import a model, encode a text, and render a conversation."""
    is_folder = isinstance(path, Path) and path.is_dir()
    rh.from_gguf(path, context=64)
    tokenizer = load_tokenizer(path) if is_folder else Tokenizer.from_gguf(path)
    tokens = tokenizer.encode("a cab \u00e9 </s>")
    tokenizer.decode(tokens)
    ChatTemplate.find(tokenizer).render([{"role": "user", "content": "a"}], tools=[{"name": "b"}])


def _mutated_fields(file: GgufFile, draw: random.Random) -> GgufFile:
    """The same file with one to three values of its metadata replaced or removed, or one tensor."""
    fields, tensors = dict(file.fields), dict(file.tensors)
    for _ in range(draw.choice((1, 1, 2, 3))):
        key = draw.choice(list(fields))
        value = draw.choice((*ODD_VALUES, fields[draw.choice(list(fields))], [1.0] * 8, float("nan"), -1.0, b"a"))
        fields[key] = value
        if draw.random() < 0.1:
            del fields[key]
        if draw.random() < 0.1:
            name, other = draw.sample(list(tensors), 2)
            tensors[name] = tensors[other].renamed(name)
        if draw.random() < 0.05:
            del tensors[draw.choice(list(tensors))]
    return GgufFile(file.path, fields, tensors, file.mapped)


def attack_gguf(rng: np.random.Generator) -> Outcome:
    """A GGUF file with damaged metadata is imported."""
    draw = random.Random(int(rng.integers(2**63)))
    path, size = _gguf(draw.choice(_FILES))
    with tempfile.TemporaryDirectory() as folder:
        try:
            if draw.random() < 0.4:
                _use(_mutated_fields(read_gguf(path), draw))
                return RIGHT
            data = path.read_bytes()
            damaged_path = Path(folder) / "model.gguf"
            head = damaged("text", data[:size], draw)[1]
            damaged_path.write_bytes(head + (data[size:] if draw.random() < 0.9 else b""))
            _use(damaged_path)
        except rh.HeteroError:
            return REFUSED
    return RIGHT


def attack_folders(rng: np.random.Generator) -> Outcome:
    """A folder with one damaged file is imported."""
    draw = random.Random(int(rng.integers(2**63)))
    files = dict(_hub())
    name = draw.choice(sorted(files))
    if name.endswith(".safetensors"):
        data = files[name]
        size = 8 + int.from_bytes(data[:8], "little")
        if draw.random() < 0.5:
            head = damaged("json", data[8:size], draw)[1]
            files[name] = len(head).to_bytes(8, "little") + head + data[size:]
        else:
            files[name] = damaged("text", data[:size], draw)[1] + data[size:]
    else:
        kind = "json" if name.endswith(".json") and draw.random() < 0.6 else "text"
        files[name] = damaged(kind, files[name], draw)[1]
    with tempfile.TemporaryDirectory() as folder:
        for each, data in files.items():
            (Path(folder) / each).write_bytes(data)
        try:
            _use(Path(folder))
        except rh.HeteroError:
            return REFUSED
    return RIGHT


@functools.cache
def _grammars() -> Grammars:
    return Grammars(ToyCodec(), 300)


def attack_forms(rng: np.random.Generator) -> Outcome:
    """A damaged schema, expression, grammar or tool is compiled, and tokens that it allows are written."""
    draw = random.Random(int(rng.integers(2**63)))
    kind = draw.choice(("json", "json", "tools", *_FORMS))
    try:
        if kind in ("json", "tools"):
            schema: Any = json.loads(damaged("json", json.dumps(_SCHEMA).encode(), draw)[1])
        else:
            text = damaged("text", _FORMS[kind].encode(), draw)[1].decode(errors="replace")
    except (ValueError, RecursionError):  # the server's JSON parser refuses such bodies
        return REFUSED
    try:
        if kind == "tools":
            row = draw.choice(FORMATS)
            with package_errors("tools"):
                grammar = row.grammar({"tool": schema}, draw.random() < 0.5, {}, bool(row.trigger))
            form = StructuredOutputs(grammar=grammar)
        elif kind == "json":
            form = StructuredOutputs(json=schema)
        else:
            form = StructuredOutputs(**{"grammar" if kind == "lark" else kind: text})
        constraint = _grammars().constraint(form)
        for _ in range(20):
            allowed = tokens_of_mask(constraint.mask(), 300)
            if not len(allowed) or constraint.advance(int(rng.choice(allowed))):
                break
    except rh.HeteroError:
        return REFUSED
    return RIGHT
