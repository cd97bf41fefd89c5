"""Search in memory over parts of files: exact vectors, BM25, filters; no I/O."""
