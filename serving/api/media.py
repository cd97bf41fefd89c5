"""Content parts to images: fetched, bounded, checked and named, before anything else sees them.

An image's name is the BLAKE3 of its bytes under the tenant's salt, or for a file of a vector store under the dynamic
library's, so that what is computed from a reference serves every tenant and nothing else passes between them. It is
handed to vLLM as the item's uuid, so that the processor cache, the chunk's keys and the file store agree on it; a
repeated image is opened lazily and never decoded.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import ipaddress
import socket
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
from PIL import Image, UnidentifiedImageError
from vllm.multimodal.image import convert_image_mode

from kvstore.chunk import DYNAMIC_TENANT, owned_content_id
from kvstore.errors import UnknownFile
from kvstore.files import FileStore
from kvstore.vector_stores import VectorStores
from serving.api.errors import InvalidRequest, NotFound, TooLarge
from serving.config import HttpSettings

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_MAX_REDIRECTS = 3


@dataclass(frozen=True)
class ResolvedImage:
    """An image ready for vLLM's renderer: `content` is its id, `image` may still be undecoded."""

    content: str
    image: Image.Image


class MediaResolver:
    """Resolves the image parts of one deployment's requests."""

    def __init__(self, settings: HttpSettings, files: FileStore, stores: VectorStores) -> None:
        self._settings, self._files, self._stores = settings, files, stores
        self._secret = files.settings.salt_secret.get_secret_value().encode()
        self._decoded: OrderedDict[str, None] = OrderedDict()  # content ids that have proved decodable

    async def resolve_messages(self, messages: list[Any], tenant: str) -> list[Any]:
        """The messages with every image part replaced by vLLM's `image_pil` part.

        Raises:
            InvalidRequest, NotFound, TooLarge: naming the part.
        """
        resolved, images = [], 0
        for m, message in enumerate(messages):
            content = message.get("content")
            if content is None or isinstance(content, str):
                resolved.append(message)
                continue
            parts = list(content)
            for p, part in enumerate(parts):
                where = f"messages[{m}].content[{p}]"
                kind = part.get("type") if isinstance(part, dict) else None
                if kind in ("image_url", "file"):
                    images += 1
                    if images > self._settings.max_images_per_request:
                        raise InvalidRequest(
                            f"more than {self._settings.max_images_per_request} images in one request", parameter=where
                        )
                    found = await self._resolve(part, kind, tenant, where)
                    parts[p] = {"type": "image_pil", "image_pil": found.image, "uuid": found.content}
                elif kind not in ("text", "refusal"):
                    raise InvalidRequest(
                        f"{where}: content parts of type {kind!r} are not supported; use text, image_url or file",
                        parameter=where,
                    )
            resolved.append({**message, "content": parts})
        return resolved

    async def _resolve(self, part: dict[str, Any], kind: str, tenant: str, where: str) -> ResolvedImage:
        owner = tenant
        if kind == "file":
            data, owner = await self._file(part, tenant, where)
        else:
            image_url = part.get("image_url")
            url = image_url.get("url") if isinstance(image_url, dict) else image_url
            if not isinstance(url, str):
                raise InvalidRequest(f"{where}: image_url needs a url", parameter=where)
            data = self._data_url(url, where) if url.startswith("data:") else await self._fetch(url, where)
        return await asyncio.to_thread(self.open, data, owner, where)

    def open(self, data: bytes, owner: str, where: str) -> ResolvedImage:
        """Check an image's bytes and name it for its owner, a tenant or DYNAMIC_TENANT.

        Pixels are decoded only the first time this content is seen.

        Raises:
            InvalidRequest: not an image, or broken. TooLarge: more bytes or pixels than allowed.
        """
        limits = self._settings
        if not data:
            raise InvalidRequest(f"{where}: the image is empty (0 bytes)", parameter=where)
        if len(data) > limits.max_image_bytes:
            raise TooLarge(f"{where}: the image has {len(data)} bytes, at most {limits.max_image_bytes} are allowed")
        try:
            image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
        except Image.DecompressionBombError as error:
            raise TooLarge(
                f"{where}: the image has more pixels than the {limits.max_image_pixels} that are allowed"
            ) from error
        except (UnidentifiedImageError, OSError, ValueError) as error:
            raise InvalidRequest(
                f"{where}: not an image in a known format ({', '.join(FORMATS)})", parameter=where
            ) from error
        if image.width * image.height > limits.max_image_pixels:
            raise TooLarge(
                f"{where}: the image has {image.width}x{image.height} pixels, "
                f"at most {limits.max_image_pixels} are allowed"
            )
        content = owned_content_id(data, owner, self._secret)
        if content in self._decoded:
            self._decoded.move_to_end(content)
            return ResolvedImage(content, image)
        try:
            image = convert_image_mode(image, "RGB")
            image.load()
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise InvalidRequest(f"{where}: the image is truncated or broken: {error}", parameter=where) from error
        self._decoded[content] = None
        if len(self._decoded) > 65536:
            self._decoded.popitem(last=False)
        return ResolvedImage(content, image)

    async def _file(self, part: dict[str, Any], tenant: str, where: str) -> tuple[bytes, str]:
        """A file's bytes, and who owns what is computed from it. References come first: their KV serves everybody."""
        reference = part.get("file")
        file_id = reference.get("file_id") if isinstance(reference, dict) else None
        if not isinstance(file_id, str):
            raise InvalidRequest(f"{where}: a file part needs file.file_id", parameter=where)
        with suppress(UnknownFile):
            return await asyncio.to_thread(self._stores.content, file_id), DYNAMIC_TENANT
        try:
            return await asyncio.to_thread(self._files.content, tenant, file_id), tenant
        except UnknownFile as error:
            raise NotFound(f"{where}: no such file: {file_id}") from error

    def _data_url(self, url: str, where: str) -> bytes:
        header, comma, payload = url.partition(",")
        if not comma or not header.endswith(";base64"):
            raise InvalidRequest(f"{where}: a data URL must be base64: data:image/png;base64,...", parameter=where)
        if len(payload) * 3 // 4 > self._settings.max_image_bytes + 3:
            raise TooLarge(f"{where}: the image is larger than {self._settings.max_image_bytes} bytes")
        try:
            return base64.b64decode(payload, validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidRequest(f"{where}: the data URL is not valid base64", parameter=where) from error

    async def _fetch(self, url: str, where: str) -> bytes:
        if not url.startswith(("http://", "https://")):
            raise InvalidRequest(f"{where}: image URLs must be data: or http(s) URLs", parameter=where)
        if not self._settings.allow_http_images:
            raise InvalidRequest(
                f"{where}: http image URLs are not allowed here; send a data URL or upload to /v1/files",
                parameter=where,
            )
        limit = self._settings.max_image_bytes
        try:
            async with httpx.AsyncClient(timeout=self._settings.http_image_timeout_s, trust_env=False) as client:
                for _ in range(_MAX_REDIRECTS + 1):
                    target, headers, extensions = await pinned(url, where)
                    async with client.stream("GET", target, headers=headers, extensions=extensions) as response:
                        if response.is_redirect:
                            url = str(httpx.URL(url).join(response.headers["location"]))
                            continue
                        response.raise_for_status()
                        data = bytearray()
                        async for block in response.aiter_bytes():
                            data += block
                            if len(data) > limit:
                                raise TooLarge(f"{where}: the image is larger than {limit} bytes")
                        return bytes(data)
        except httpx.HTTPError as error:
            raise InvalidRequest(f"{where}: the image could not be fetched: {error}", parameter=where) from error
        raise InvalidRequest(f"{where}: more than {_MAX_REDIRECTS} redirects", parameter=where)


async def pinned(url: str, where: str) -> tuple[str, dict[str, str], dict[str, Any]]:
    """Resolve a URL's host once and aim the request at that address, so that no second look-up can change it.

    Raises:
        InvalidRequest: the host is unknown, or any of its addresses is not a public one.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise InvalidRequest(f"{where}: unknown host {host!r}", parameter=where) from error
    addresses = [ipaddress.ip_address(entry[4][0]) for entry in found]
    if not addresses or not all(address.is_global for address in addresses):
        raise InvalidRequest(f"{where}: {host!r} is not a public address", parameter=where)
    address = addresses[0]
    netloc = f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"
    return parts._replace(netloc=netloc).geturl(), {"Host": parts.netloc}, {"sni_hostname": host}
