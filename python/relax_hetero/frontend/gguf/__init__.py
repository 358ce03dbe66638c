"""Language models of GGUF files: reading the file, and its functions in Relax."""
