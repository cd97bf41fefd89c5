"""Benchmarks: `orbitserve bench NAME`. Both arms of a comparison run in one session, in alternating turns."""
