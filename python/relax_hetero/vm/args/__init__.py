"""From what a caller gives to what a function takes, and from what it returns to what the caller gets."""
