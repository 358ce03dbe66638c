"""Element types of a byte and less, which LLVM has no arithmetic on."""
