"""Compaction: fewer KV entries for decode than the prompt has tokens (elastic_cache.md)."""
