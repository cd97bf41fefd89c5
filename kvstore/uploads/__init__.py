"""Uploaded files, vector stores, and deletions that are still to be carried out."""
