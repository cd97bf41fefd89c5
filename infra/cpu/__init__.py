"""Tuning of a CPU host: kernels, threads, shared cores."""
