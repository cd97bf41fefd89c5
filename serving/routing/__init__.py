"""Which replica takes a request."""
