"""OpenAPI document: FastAPI's own, with each route's errors and with bearer keys.

FastAPI knows nothing of middleware and exception handlers, and documents its own 422, which is never answered.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from serving.api.auth import DOWNLOAD, OPEN_PATHS

_SCHEMA, _SCHEME = "OrbitError", "bearer"
_GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_CURSORS = ("after", "before")  # ids of listed items
_STORE_READS = ("/v1/vector_stores/{store_id}/search",)  # a POST that changes nothing

ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The part, as messages[0].content[2]."},
                "code": {"type": "integer", "description": "The HTTP status."},
            },
        }
    },
}
_MEANINGS = {
    400: "A field, image or document cannot be used, or the prompt is too long",
    401: "No API key, or an unknown one",
    403: "Not an administrator's key",
    404: "No such file, vector store, model or operating point for this tenant",
    408: "The body did not come in time",
    413: "A body, file, image or request is larger than its limit",
    429: "Too many requests, a full queue, or too many bytes in progress",
    500: "The server failed; its log says more",
    501: "Not available in this version",
    503: "A role does not answer; trying again is safe",
    504: "The answer did not end in time",
}
_RETRY_AFTER = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds to wait."}}


def document_errors(app: FastAPI) -> None:
    """Add errors and keys to an application's OpenAPI document."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _completed(plain())
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _completed(document: dict[str, Any]) -> dict[str, Any]:
    components = document.setdefault("components", {})
    components.setdefault("schemas", {})[_SCHEMA] = ERROR_SCHEMA
    components["securitySchemes"] = {
        _SCHEME: {"type": "http", "scheme": "bearer", "description": "A key of `http.api_keys`, where there are any."}
    }
    document["security"] = [{_SCHEME: []}]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if path in OPEN_PATHS:
                operation["security"] = []
            responses = operation.setdefault("responses", {})
            responses.pop("422", None)
            for status in _statuses(path, method, operation):
                responses[str(status)] = _response(path, status)
    return document


def _statuses(path: str, method: str, operation: dict[str, Any]) -> set[int]:
    """Errors that a route may answer."""
    if path in OPEN_PATHS:
        return {503} if path == "/health" else set()
    found = {401, 500}
    named = "{" in path  # something by its id
    continues = any(parameter["name"] in _CURSORS for parameter in operation.get("parameters", ()))
    if named or operation.get("parameters") or "requestBody" in operation:
        found.add(400)
    if named or continues or ("requestBody" in operation and path != "/v1/files"):  # bodies name models and files
        found.add(404)
    if "requestBody" in operation:
        found |= {408, 413}
    if method == "post" or DOWNLOAD.fullmatch(path):
        found.add(429)
    if _is_administrators(path, method):
        found.add(403)
    if path in _GENERATING or path.startswith("/v1/orbit/"):
        found.add(503)
    if path in _GENERATING:
        found.add(504)
    if path in _STORE_READS or path.endswith("/files/{file_id}/content"):
        found.add(501)
    return found


def _is_administrators(path: str, method: str) -> bool:
    changes = method != "get" and path not in _STORE_READS
    return changes and (
        path.startswith(("/v1/vector_stores", "/v1/orbit/operating_points")) or path == "/v1/files/{file_id}"
    )


def _response(path: str, status: int) -> dict[str, Any]:
    if path in OPEN_PATHS:
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: {"type": "string"} for name in ("status", "reason")},
        }
    else:
        schema = {"$ref": f"#/components/schemas/{_SCHEMA}"}
    found: dict[str, Any] = {"description": _MEANINGS[status], "content": {"application/json": {"schema": schema}}}
    return found | ({"headers": _RETRY_AFTER} if status == 429 else {})
