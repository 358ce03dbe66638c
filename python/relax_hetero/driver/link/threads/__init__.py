"""Worker threads of llvm kernels, and the loop of staged copies, as compiled code in executables."""
