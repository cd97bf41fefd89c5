"""Retrieval: embedders, the retriever over indices in memory, and what crosses between it and the ingress."""
