"""Links that a deletion reaches, of those that background work holds."""

from __future__ import annotations

from kvstore.deletions import reaches
from prefill_workers.protocol import LinkRequest


def brought(request: LinkRequest, content: str, tenant: str) -> bool:
    """True if a request brought a content that a tenant has deleted."""
    return reaches(content, tenant, request.tenant) and any(span.content == content for span in request.chunks)
