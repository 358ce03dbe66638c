"""Output: text, tables for terminals, HTML elements. This package knows nothing about the data that it shows."""
