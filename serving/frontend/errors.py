"""Errors that refuse a request, of vLLM's kinds.

vLLM's serving code turns them into responses and streams.
"""

from __future__ import annotations

from http import HTTPStatus

from vllm.exceptions import GracefulHTTPError, VLLMValidationError


class InvalidRequest(VLLMValidationError):
    """400: the request is wrong; `parameter` names the part, such as `messages[0].content[2]`."""


class DeadlineExceeded(GracefulHTTPError):
    """504: the answer did not end in time; what was begun for it is cancelled."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the answer did not end within {seconds:g} s", HTTPStatus.GATEWAY_TIMEOUT)


class OverloadedError(GracefulHTTPError):
    """429: queues are full; nothing was started."""

    retry_after_s = 1.0

    def __init__(self, message: str) -> None:
        super().__init__(message, HTTPStatus.TOO_MANY_REQUESTS)


class RateLimited(OverloadedError):
    """429: a tenant's limit of requests or tokens a minute is used up for now."""

    def __init__(self, message: str, resource: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.resource, self.retry_after_s = resource, retry_after_s
