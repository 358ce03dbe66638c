"""Folders of Hugging Face as language models: their files become what a GGUF file gives."""
