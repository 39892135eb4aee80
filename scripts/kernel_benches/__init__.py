"""The cases that `scripts/bench_kernels.py` times, one module for each kind of op."""
