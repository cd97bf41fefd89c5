"""The prefill engine: everything that knows vLLM's model runner."""
