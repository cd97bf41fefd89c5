"""Decode role: a stock, text-only vLLM engine that pulls linked KV over NIXL."""
