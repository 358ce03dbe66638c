"""The server of a GGUF file under lm-evaluation-harness, and its log-likelihoods against those of the Python API.

python apps/bench/llm_bench/harness.py gemma                 # 200 questions with choices, 200 with written answers

The tasks are sums, which need no download. Exits with 1 if an item lacks an answer or a log-likelihood differs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import httpx
import numpy as np
import yaml

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[2] / "python")]
from compare import model_path  # noqa: E402
from servers import OURS, Load, running  # noqa: E402
from smoke import smoke  # noqa: E402

CHOICES, WRITTEN = "sums_with_choices", "sums_in_words"
TOLERANCE = 1e-4
"""Difference of log-likelihoods, which pass through JSON."""
TASKS = {
    CHOICES: {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{label}}"},
    WRITTEN: {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[label]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}
"""Tasks of the harness, by name."""


def write_tasks(folder: Path, items: int) -> None:
    """Write the questions and both tasks."""
    draw = np.random.default_rng(0)
    lines = []
    for _ in range(items):
        left, right = map(int, draw.integers(2, 60, 2))
        choices = [f" {left + right + int(off)}" for off in draw.permutation([0, 1, 10])]
        question = f"Question: How much is {left} + {right}?\nAnswer:"
        lines.append({"question": question, "choices": choices, "label": choices.index(f" {left + right}")})
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    for name, task in TASKS.items():
        body = {"task": name, **common, "doc_to_text": "{{question}}", **task}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(body))


def evaluate(url: str, model: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Samples of the harness by task: completions, and written answers as conversations if the model has a template."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    has_template = httpx.get(f"{url}/tokenizer_info").json()["chat_template"] is not None
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    samples: dict[str, list[dict[str, Any]]] = {}
    for kind, path, tasks in (
        ("local-completions", "completions", [CHOICES, WRITTEN]),
        ("local-chat-completions", "chat/completions", [WRITTEN] * has_template),
    ):
        if not tasks:
            continue
        arguments = {"model": model, "base_url": f"{url}/v1/{path}", "num_concurrent": 8, "max_retries": 1}
        found = lm_eval.simple_evaluate(
            kind, arguments, tasks, task_manager=manager, apply_chat_template="chat" in kind, bootstrap_iters=0
        )
        for task, values in found["results"].items():
            click.echo(f"{kind}, {task}: {json.dumps({k: v for k, v in values.items() if isinstance(v, float)})}")
        samples |= {f"{kind}, {task}": each for task, each in found["samples"].items()}
    return samples


def largest_difference(path: Path, samples: list[dict[str, Any]]) -> float:
    """Largest difference of the log-likelihoods of choices from those that `rh.llm.Engine` computes."""
    import relax_hetero as rh

    model, tokenizer = rh.llm.load(path, context=512)
    prompts, counts, found = [], [], []
    for sample in samples:
        for argument, response in zip(sample["arguments"], sample["resps"], strict=True):
            context, choice = argument
            begin, whole = (tokenizer.encode(text, begin=False) for text in (context, context + choice))
            prompts.append(whole)
            counts.append(len(whole) - len(begin))
            found.append(float(response[0][0]))
    with rh.llm.Engine(model, tokenizer) as engine:
        texts = engine.generate(prompts, rh.llm.SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0))
    expected = [
        sum(each.logprob for each in text.prompt_logprobs[-count:]) for text, count in zip(texts, counts, strict=True)
    ]
    return float(np.abs(np.subtract(found, expected)).max())


@click.command(help=__doc__)
@click.argument("model")
@click.option("--items", default=200, show_default=True, help="Questions of each task.")
@click.option("--threads", default=2, show_default=True)
@click.option("--cache", type=click.Path(path_type=Path), default=Path(".cache/language_models"), show_default=True)
@smoke(model="tiny", items=4)
def main(model: str, items: int, threads: int, cache: Path) -> None:
    """Evaluate, and compare."""
    os.environ["TVM_NUM_THREADS"] = str(threads)
    cache.mkdir(parents=True, exist_ok=True)
    path = model_path(model, cache)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["HF_HOME"] = str(folder / "cache")
        os.environ["HF_HUB_OFFLINE"] = "1"
        write_tasks(folder, items)
        with running(OURS, path, Load(8, 1, 480, 24, threads), None, cache / "harness.log") as url:
            samples = evaluate(url, path.stem, folder)
    lost = {task: items - len(each) for task, each in samples.items() if len(each) != items}
    difference = largest_difference(path, samples[f"local-completions, {CHOICES}"])
    click.echo(f"{sum(map(len, samples.values()))} items; log-likelihoods differ by {difference:.2g} at most")
    if lost or not difference < TOLERANCE:
        sys.exit(f"missing items {lost}, or log-likelihoods that differ by more than {TOLERANCE:g}")


if __name__ == "__main__":
    main()
