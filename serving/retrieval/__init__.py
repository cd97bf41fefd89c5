"""Retrieval: embedders, indices in memory, and the calls between ingress and retriever."""
