"""The prefill loop, its scheduler, and the cost of a forward."""
