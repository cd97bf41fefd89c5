"""Errors of getting a model."""


class ModelUnavailable(Exception):
    """A model that does not exist or cannot be had; the message says what to do."""


class DownloadFailed(ModelUnavailable):
    """A wheel that the package index did not give."""
