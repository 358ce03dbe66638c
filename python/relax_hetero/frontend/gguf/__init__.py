"""Language models of GGUF files: what the file says of the model, and its functions in Relax."""
