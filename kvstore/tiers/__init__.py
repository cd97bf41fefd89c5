"""Storage tiers: memory, local disk, S3 and other fsspec URLs, the Ray object store."""
