"""Benchmarks of the project: `python -m tests.benchmarks NAME`."""
