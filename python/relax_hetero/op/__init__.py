"""Relax operators of this library.

They are hints and transfers, requirements on sizes, encoded tensors, attention without and with a cache, row programs,
block-quantized weights, and weights that stay on a CPU.

The operators of placement build TVM's own ``relax.hint_on_device`` and ``relax.to_vdevice`` calls, so that
``R.hint_on_device`` and ``R.to_vdevice`` in TVMScript are the same thing to every pass. Importing this package makes
TVMScript's look-up of vdevices strict (see `strict_tvmscript`).
"""

from __future__ import annotations

from .attention import attention
from .cached_attention import cached_attention
from .copies import copy
from .encoded import elementwise, matmul, prepacked, relayout, set_encoding, unset_encoding
from .functions import apply_function
from .placement import encode_hint, hint_on_device, hinted_vdevice, is_hint, to_vdevice
from .quantized_matmul import block_matmul, block_rows, dequantize_blocks
from .require import require, requirement
from .rows import rows
from .sharding import shard
from .streamed import panel_fragments, stream
from .strict_tvmscript import make_tvmscript_strict

__all__ = [
    "apply_function",
    "attention",
    "block_matmul",
    "block_rows",
    "cached_attention",
    "copy",
    "dequantize_blocks",
    "elementwise",
    "encode_hint",
    "hint_on_device",
    "hinted_vdevice",
    "is_hint",
    "matmul",
    "panel_fragments",
    "prepacked",
    "relayout",
    "require",
    "requirement",
    "rows",
    "set_encoding",
    "shard",
    "stream",
    "to_vdevice",
    "unset_encoding",
]

make_tvmscript_strict()
