"""The operator: KV layouts, rotary embeddings, patches, and the kernels that apply them."""
