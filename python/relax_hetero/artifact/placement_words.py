"""Words of placement reports that their writers and their readers share."""

AUTO = "auto, "
"""What reasons of automatic placement begin with; up to the first ": " they say what decided, and then give figures."""
