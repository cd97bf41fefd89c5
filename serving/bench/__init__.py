"""Benchmarks for a model or machine of one's own (`orbitserve bench`), and what all benchmarks share."""
