"""Runs a model of a GGUF file on a list of tokens, prompt in chunks, then token by token, without an engine."""

import numpy as np

import relax_hetero as rh
from relax_hetero.frontend.gguf.hyperparameters import hyperparameters_of
from relax_hetero.frontend.gguf.tensor_parallel import split_caches
from relax_hetero.frontend.language_model_files import read_language_model
from relax_hetero.target.vdevice import parse_vdevices

ROWS = 32


def run(
    path,
    tokens,
    decoded,
    vdevices=None,
    placement=None,
    page_type="float32",
    activation_bits=16,
    activations=None,
    stream_experts=0,
    all_logits=True,
):
    """Logits of all tokens: a prompt in chunks, the last `decoded` ones by themselves.

    Without `all_logits`, chunks are computed again for the logits of each row.
    """
    file = read_language_model(path)
    caches = hyperparameters_of(file).caches
    if placement:  # devices of a mesh have a part each
        caches, _ = split_caches(hyperparameters_of(file), placement, parse_vdevices(vdevices))
    mod = rh.from_gguf(
        file,
        vdevices,
        placement,
        chunks=(ROWS,),
        slots=2,
        context=256,
        page_type=page_type,
        all_logits=all_logits,
        activation_bits=activation_bits,
        activations=activations,
        stream_experts=stream_experts,
    )
    donated = [f"pages_{layer}" for layer in range(len(caches))]
    executable = rh.compile(mod, donate={"decode_1": donated, f"prefill_{ROWS}": donated})
    machine = rh.vm.VirtualMachine(executable)
    signature = executable.signature("decode_1")
    shapes = {value.name: tuple(value.shape) for value in signature.inputs}
    logit_parts = sum(value.name.startswith("logits") for value in signature.outputs)  # one on each device of a mesh
    counts, pages = {}, []
    for cache, name in zip(caches, donated, strict=True):
        count, *sizes = shapes[name]
        if cache.state:
            pages.append(np.full((count, *sizes), np.nan, "float32"))
            continue
        table = "table_window" if cache.window else "table_full"
        counts[table] = count if isinstance(count, int) else np.prod(shapes[table])  # on CPUs any number
        pages.append(np.full((counts[table], *sizes), 7.0, page_type))  # not 0 where nothing is written
    tables = {name: table_of(shapes[name], counts[name]) for name in shapes if name.startswith("table")}
    parts, prompt = [], len(tokens) - decoded
    cuts = [(first, min(first + ROWS, prompt)) for first in range(0, prompt, ROWS)]
    cuts += [(first, first + 1) for first in range(prompt, len(tokens))]
    for first, end in cuts:
        rows = ROWS if first < prompt else 1
        inputs = {"tokens": np.zeros(rows, "int32"), "positions": np.full(rows, end - 1, "int32")}
        inputs |= {"sequences": np.full(rows, -1, "int32"), **tables}
        inputs["tokens"][: end - first] = tokens[first:end]
        inputs["positions"][: end - first] = np.arange(first, end)
        inputs["sequences"][: end - first] = 1
        has_last, before = rows > 1 and not all_logits, pages
        for last in range(end - first) if has_last else [None]:
            if has_last:  # calls may change the pages
                inputs["last"], pages = np.array([last], "int32"), [np.from_dlpack(page).copy() for page in before]
            results = machine["decode_1" if rows == 1 else f"prefill_{ROWS}"](
                **inputs, **dict(zip(donated, pages, strict=True))
            )
            logits = np.concatenate([part.numpy() for part in results[:logit_parts]], axis=1)
            parts.append(logits[: 1 if has_last else end - first])
        pages = results[-len(donated) :]
        if rows == 1:
            np.testing.assert_array_equal(results[logit_parts].numpy(), logits.argmax(axis=1))
    return np.concatenate(parts)


def table_of(shape, count):
    """Pages of slot 1 in arbitrary order, repeated if there are fewer than columns."""
    table = np.full(shape, -1, "int32")
    own = np.random.default_rng(3).permutation(count)[: count // shape[0]]
    table[1] = np.resize(own, shape[1])
    return table


def check_steps_ahead(model, slots, count):
    """Steps that take the tokens of the step before, while that may run, against steps one by one."""
    lengths = [model.cache.length(slot) for slot in slots]
    step, ahead = model.begin_decode(slots, slots), []
    for _ in range(count):
        last, step = step, model.begin_decode(slots, step)
        ahead.append(last.tokens())
    ahead.append(step.tokens())
    for slot, length in zip(slots, lengths, strict=True):
        model.cache.truncate(slot, length)
    tokens = slots
    for expected in ahead:
        tokens = model.decode(slots, tokens).argmax(axis=1).tolist()
        assert tokens == expected
    assert len({tuple(tokens) for tokens in ahead}) > 1
