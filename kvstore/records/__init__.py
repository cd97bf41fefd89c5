"""Records: keys, the file format, and its checksums."""
