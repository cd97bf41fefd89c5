"""The canonical KV library: layouts, the operator, the file format and storage tiers."""
