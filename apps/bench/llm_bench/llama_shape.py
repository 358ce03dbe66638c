"""Sizes of a llama-shaped model whose weights are random."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a model.

    Attributes
    ----------
    width, feed_forward, vocabulary : int
        Of a row, of a row between the products of a feed-forward part, and of logits.
    layers, heads, kv_heads, size : int
        Layers; heads of queries and of keys, and the elements of each.
    """

    width: int = 4096
    feed_forward: int = 14336
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    vocabulary: int = 128256

    @property
    def joined(self) -> int:
        """Elements of the joined projection of a row."""
        return (self.heads + 2 * self.kv_heads) * self.size

    @property
    def weights(self) -> int:
        """That a token is multiplied by, the table of embeddings not among them."""
        return self.layers * self.layer_weights + self.width * self.vocabulary

    @property
    def layer_weights(self) -> int:
        """Of a layer."""
        return self.width * (self.joined + self.heads * self.size + 3 * self.feed_forward)

    def cache_bytes(self, tokens: int) -> int:
        """Of keys and values of so many tokens, of 16 bits, in all layers."""
        return 2 * 2 * self.layers * self.kv_heads * self.size * tokens

    def operations(self, rows: int) -> int:
        """Of a prefill of so many tokens whose last row's logits are wanted: products, and causal attention."""
        attention = 2 * self.heads * self.size * rows * (rows + 1)
        return 2 * rows * self.layers * self.layer_weights + self.layers * attention + 2 * self.width * self.vocabulary


SMALL = LlamaShape(64, 192, 2, 4, 2, 16, 256)
"""Of a smoke test."""
