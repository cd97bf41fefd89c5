"""Offline jobs: precompute, compile-trace, and their planning."""
