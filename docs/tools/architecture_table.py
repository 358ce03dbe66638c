"""The table of architectures on reference/architectures.md, from the rows of the library and the models of the tests.

python docs/tools/architecture_table.py --write    # puts it into the page
python docs/tools/architecture_table.py --check    # fails if the page differs
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from relax_hetero.frontend.gguf.architectures import ARCHITECTURES, Architecture

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "architectures.md"
MARKER = "<!-- architecture_table.py -->\n"


def differences(row: Architecture) -> str:
    """Differences from Llama, in words."""
    norms, windows = row.norms, row.windows
    texts = {
        "encoder": not row.is_causal,
        "learned positions": not row.rotary,
        "layer norms": norms.kind == "layer",
        "norms of results": norms.attention_out and norms.attention,
        "norms of results only": norms.attention_out and not norms.attention,
        "norms of sums": norms.attention_sum,
        "parallel": row.is_parallel or norms.attention == norms.feed_forward and norms.attention,
        "parallel if stated": row.is_parallel is None,
        "windows": windows is not None,
        "rotated windows": windows is not None and windows.are_rotated,
        f"every {row.unrotated_period}th layer not rotated": row.unrotated_period,
        "norms of queries and keys": "attn_q_norm.weight" in row.required,
        "biases": any(name.endswith(".bias") and name.startswith("attn_") for name in row.required),
        "attention sinks": "attn_sinks.weight" in row.required,
        "compressed keys (MLA)": row.has_latent_attention,
        "longrope": "rope_factors_long.weight" in row.optional,
        f"{row.activation.replace('_', ' ')}{'' if row.is_gated else ', no gate'}": row.activation != "silu",
        "scaled embeddings": row.scaled_embedding,
        "factors of embeddings, residuals or logits": row.scales,
        "queries that grow with their position": row.has_temperature,
        "attention within chunks": row.attention_chunk,
        "gated delta rule": row.has_delta_rule,
        "gates of attention": row.has_output_gate,
        "norms of values": norms.values,
        "streams (AltUp)": row.has_streams,
    }
    return ", ".join(text for text, holds in texts.items() if holds) or "–"


def table() -> str:
    """The table in Markdown."""
    sys.path.insert(0, str(ROOT / "tests" / "python"))
    from llm import gguf_files
    from llm.architecture_models import ENCODERS, MODELS

    models = [*ENCODERS.values(), *MODELS.values()]
    classes = {model.architecture: model.family for model in reversed(models)}
    compared = {sizes.architecture for sizes in gguf_files.MODELS.values()}
    columns = ("architecture", "models", "rotated", "differences from Llama", "compared with")
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for name, row in ARCHITECTURES.items():
        other = "its own, llama.cpp" if name in compared else classes[name]
        lines.append(f"| {name} | {row.models} | {row.rotary or 'no'} | {differences(row)} | {other} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true", help="write the table")
    mode.add_argument("--check", action="store_true", help="fail if the page differs")
    options = parser.parse_args()
    before, _, rest = PAGE.read_text().partition(MARKER)
    end = rest.find("\n\n")
    page = before + MARKER + table() + (rest[end + 1 :] if end >= 0 else "")
    if options.write:
        PAGE.write_text(page)
    elif page != PAGE.read_text():
        print(f"{PAGE.relative_to(ROOT)} differs: python docs/tools/architecture_table.py --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
