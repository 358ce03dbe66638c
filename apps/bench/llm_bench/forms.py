"""Answers that follow random JSON schemas: whether all validate, and their speed against texts without a form.

    python apps/bench/llm_bench/forms.py gemma --schemas 500 --texts 16      or a file in place of gemma

Rounds of `--texts` answers to as many schemas alternate with free texts of the same lengths, which end at no stop
token. Exits with 1 if an answer that was completed does not validate. Needs the package jsonschema.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema

import relax_hetero as rh

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[2] / "python")]
from compare import model_path  # noqa: E402

NAMES = ("name", "age", "city", "tags", "price", "status", "address", "email", "items", "score", "note", "kind")
PATTERNS = ("^[a-z]{3,8}$", "^[0-9]{5}$", "^(north|south)-[A-Z]{2}$", "^\\d{4}-\\d{2}-\\d{2}$")
MAX_TOKENS = 120


def main() -> int:
    """Run all rounds and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--cache", type=Path, default=Path(".cache/language_models"))
    parser.add_argument("--vdevice", action="append")
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.8)
    options = parser.parse_args()
    draw, batches = random.Random(0), sorted({1, 2, 4, 8, options.texts})
    model, tokenizer = rh.llm.load(
        model_path(options.model, options.cache), options.vdevice, batches=batches, background=False
    )
    completed = wrong = 0
    ratios = []
    with rh.llm.Engine(model, tokenizer) as engine:
        for first in range(0, options.schemas, options.texts):
            count = min(options.texts, options.schemas - first)
            schemas = [object_schema(draw, 2) for _ in range(count)]
            prompts = [f"A random record as JSON, by the schema {json.dumps(schema)}:\n" for schema in schemas]
            begin = time.perf_counter()
            answers = engine.generate(
                prompts,
                [
                    rh.llm.SamplingParams(
                        max_tokens=MAX_TOKENS,
                        temperature=options.temperature,
                        seed=first + index,
                        structured_outputs=rh.llm.StructuredOutputs(json=schema),
                    )
                    for index, schema in enumerate(schemas)
                ],
            )
            middle = time.perf_counter()
            engine.generate(
                [f"Free of any form. {prompt}" for prompt in prompts],  # no prefix in common
                [
                    rh.llm.SamplingParams(
                        max_tokens=len(answer.tokens), temperature=options.temperature, seed=index, ignore_eos=True
                    )
                    for index, answer in enumerate(answers)
                ],
            )
            ratios.append((time.perf_counter() - middle) / (middle - begin))
            for schema, answer in zip(schemas, answers, strict=True):
                if answer.finish_reason == "stop":
                    completed += 1
                    wrong += not is_valid(schema, answer.text)
            print(
                f"{first + count:4d} schemas, {completed} answers completed, {wrong} wrong, speed of the round "
                f"{ratios[-1]:.3f}, median {statistics.median(ratios):.3f} of that of free texts",
                flush=True,
            )
    return int(wrong > 0)


def is_valid(schema: dict[str, Any], text: str) -> bool:
    """Whether a text is JSON that validates."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (json.JSONDecodeError, jsonschema.ValidationError) as error:
        print(f"{text!r} of {json.dumps(schema)}: {error}", file=sys.stderr)
        return False
    return True


def object_schema(draw: random.Random, depth: int) -> dict[str, Any]:
    """Schema of an object with one to five properties."""
    names = draw.sample(NAMES, draw.randint(1, 5))
    schema: dict[str, Any] = {"type": "object", "properties": {name: value_schema(draw, depth) for name in names}}
    schema["required"] = names if draw.random() < 0.7 else names[: draw.randint(0, len(names))]
    if draw.random() < 0.7:
        schema["additionalProperties"] = False
    return schema


def value_schema(draw: random.Random, depth: int) -> dict[str, Any]:
    """Schema of a property's value."""
    kinds = ["string", "integer", "number", "boolean", "enum", "pattern", "null or text"]
    kind = draw.choice(kinds + (["object", "array", "one of"] if depth else []))
    if kind == "object":
        return object_schema(draw, depth - 1)
    if kind == "array":
        limits = {"minItems": draw.randint(0, 2), "maxItems": draw.randint(2, 4)}
        return {"type": "array", "items": value_schema(draw, depth - 1), **limits}
    if kind == "one of":
        return {"anyOf": [value_schema(draw, 0), value_schema(draw, 0)]}
    if kind == "string":
        return {"type": "string", "maxLength": draw.randint(5, 40)}
    if kind in ("integer", "number"):
        low = draw.randint(-100, 100)
        return {"type": kind, "minimum": low, "maximum": low + draw.randint(1, 1000)}
    if kind == "enum":
        return {"enum": draw.sample(["red", "green", "blue", 1, 2.5, None, True], draw.randint(1, 5))}
    if kind == "pattern":
        return {"type": "string", "pattern": draw.choice(PATTERNS)}
    return {"type": "boolean"} if kind == "boolean" else {"type": ["string", "null"], "maxLength": 20}


if __name__ == "__main__":
    sys.exit(main())
