"""Embedders by name: `lexical`, `static`, `http:URL`."""
