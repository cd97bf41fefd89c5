"""Prefill role: runs, linking, hand-off and patch forming on vLLM's executor."""
