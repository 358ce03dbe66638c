"""Matrix products: one definition for every type, layout, tail and epilogue; and products with 4-bit weights."""
