"""The order of the chunks that a request leaves free."""
