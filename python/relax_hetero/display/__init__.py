"""How things are shown: text, tables for terminals, elements of HTML. What is shown hands in its data."""
