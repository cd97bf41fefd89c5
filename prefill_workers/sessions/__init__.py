"""Sessions: conditioned KV of one conversation's segments, kept so that a window can slide."""
