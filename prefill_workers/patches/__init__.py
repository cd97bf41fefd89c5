"""Harvest of canonical KV and deficits, and the patch compiler."""
