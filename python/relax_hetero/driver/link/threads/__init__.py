"""The threads of llvm kernels as code that executables bring along: pools, where they run, and copies in parts."""
