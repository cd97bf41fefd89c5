"""OrbitServe's canonical KV library: layouts, the operator, the file format and the storage tiers."""
