"""Errors that refuse a request, of vLLM's kinds.

vLLM's serving code turns them into responses and streams.
"""

from __future__ import annotations

from http import HTTPStatus

from vllm.exceptions import GracefulHTTPError, VLLMValidationError


class InvalidRequest(VLLMValidationError):
    """400: the request is wrong; `parameter` names the part, such as `messages[0].content[2]`."""


class OverloadedError(GracefulHTTPError):
    """429: queues are full; nothing was started."""

    def __init__(self, message: str) -> None:
        super().__init__(message, HTTPStatus.TOO_MANY_REQUESTS)
