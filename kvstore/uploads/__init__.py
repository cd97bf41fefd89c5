"""Uploaded files, vector stores, and pending deletions."""
