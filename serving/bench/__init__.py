"""Benchmarks for one's own model or machine (`orbitserve bench`), and their common parts."""
