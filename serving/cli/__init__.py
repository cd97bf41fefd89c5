"""The `orbitserve` command."""
