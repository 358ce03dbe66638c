"""Command buffers recorded by hand: operands, recording, binding tables, submission."""
