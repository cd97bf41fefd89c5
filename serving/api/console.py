"""`/console`, a page in the browser to try retrieval in, and pictures of pages."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from serving.api.errors import NotFound
from serving.api.media import MediaResolver

_PAGE = Path(__file__).with_name("console.html")


def console_router(media: MediaResolver) -> APIRouter:
    """The console, and pages of PDFs as PNG for whoever may name the file."""
    router = APIRouter(tags=["console"])
    html = _PAGE.read_text()

    @router.get("/console", summary="A page to try retrieval in", response_class=HTMLResponse)
    async def console() -> HTMLResponse:
        return HTMLResponse(html)

    @router.get("/v1/orbit/files/{file_id}/pages/{page}", summary="The picture of a PDF's page")
    async def page_picture(request: Request, file_id: str, page: int) -> Response:
        picture = await media.page_picture(file_id, page, request.state.tenant)
        if picture is None:
            raise NotFound(f"{file_id} has no page {page}")
        return Response(picture, media_type="image/png")

    return router
