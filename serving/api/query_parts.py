"""Queries of searches: words, and images as content parts like those of a chat.

| part                                                                | what                                    |
|---------------------------------------------------------------------|-----------------------------------------|
| `{"type": "text", "text": ...}`                                     | words                                   |
| `{"type": "image_url", "image_url": {"url": ...}}`                  | an image                                |
| `{"type": "file", "file": {"file_id": ...}}`                        | an image that was uploaded              |
| `{"type": "image_file", "image_file": {"file_id": ..., "page": 2}}` | the same, or a page, as results name it |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from serving.api.media import MediaResolver
from serving.frontend.errors import InvalidRequest

_MOST_IMAGES = 4  # of a query
IMAGES = ("image_url", "file", "image_file")


class Asked(NamedTuple):
    """Words to search by, and bytes of image files."""

    text: str
    images: tuple[bytes, ...] = ()


async def read_query(parts: Sequence[Mapping[str, Any]], media: MediaResolver, tenant: str, where: str) -> Asked:
    """A query of content parts, its images fetched and checked.

    Raises:
        InvalidRequest, NotFound, TooLarge: naming the part.
    """
    texts: list[str] = []
    images: list[bytes] = []
    for i, part in enumerate(parts):
        at, kind = f"{where}[{i}]", part.get("type")
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind in IMAGES:
            if len(images) == _MOST_IMAGES:
                raise InvalidRequest(f"{at}: a query has at most {_MOST_IMAGES} images", parameter=at)
            images.append(await _image(part, media, tenant, at))
        else:
            raise InvalidRequest(f"{at}: a query's parts are text, {', '.join(IMAGES)}", parameter=at)
    text = "\n".join(texts)
    if not text.strip() and not images:
        raise InvalidRequest(f"{where}: neither words nor images to search by", parameter=where)
    return Asked(text, tuple(images))


async def _image(part: Mapping[str, Any], media: MediaResolver, tenant: str, where: str) -> bytes:
    if part["type"] != "image_file":
        return await media.image_bytes(dict(part), tenant, where)
    named = part.get("image_file")
    file_id, page = (named.get("file_id"), named.get("page")) if isinstance(named, Mapping) else (None, None)
    if not isinstance(file_id, str) or not (page is None or type(page) is int):
        raise InvalidRequest(f"{where}: image_file needs a file_id, and may have a page", parameter=where)
    if page is None:
        return await media.image_bytes({"type": "file", "file": {"file_id": file_id}}, tenant, where)
    picture = await media.page_picture(file_id, page, tenant)
    if picture is None:
        raise InvalidRequest(f"{where}: {file_id} has no page {page}", parameter=where)
    return picture
