"""Bytes of media that a request names by URL: http(s) where it is allowed, and data URLs.

A server that fetches what clients name must not be led to its own network: a host is resolved once, all its addresses
must be public, and the request goes to the address that was looked at. Redirects are followed by the same rules.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import socket
import ssl
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import httpx

from serving.api.errors import TooLarge
from serving.frontend.errors import InvalidRequest
from serving.settings import HttpSettings

_MAX_REDIRECTS = 3
_UNICAST = ipaddress.ip_network("2000::/3")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class MediaFetcher:
    """Client for media on the web, within a deployment's bounds."""

    def __init__(self, settings: HttpSettings) -> None:
        self._settings = settings

    @cached_property
    def _certificates(self) -> ssl.SSLContext:
        """TLS context for https, which takes long to read and is shared by all clients."""
        return httpx.create_ssl_context(trust_env=False)

    async def fetch(self, url: str, where: str, limit: int) -> bytes:
        """Bytes behind a URL, of http(s) or data.

        Raises:
            InvalidRequest: the URL, its host or its answer is not allowed, or does not come in time.
            TooLarge: more than `limit` bytes.
        """
        if url.startswith("data:"):
            return await asyncio.to_thread(bytes_of_data_url, url, where, limit)
        if not url.startswith(("http://", "https://")):
            raise InvalidRequest(f"{where}: URLs of images and videos must be data: or http(s) URLs", parameter=where)
        if not self._settings.allow_http_images:
            raise InvalidRequest(
                f"{where}: http(s) URLs are not allowed here (`http.allow_http_images`); "
                "send a data URL or upload to /v1/files",
                parameter=where,
            )
        try:
            async with (
                asyncio.timeout(self._settings.http_image_timeout_s),
                httpx.AsyncClient(timeout=None, trust_env=False, verify=self._certificates) as client,
            ):
                for _ in range(_MAX_REDIRECTS + 1):
                    self._check_domain(url, where)
                    target, headers, extensions = await pinned(url, where)
                    headers["Accept-Encoding"] = "identity"
                    async with client.stream("GET", target, headers=headers, extensions=extensions) as response:
                        if response.has_redirect_location:
                            url = str(httpx.URL(url).join(response.headers["location"]))
                            continue
                        response.raise_for_status()
                        encoding = response.headers.get("content-encoding", "identity")
                        if encoding.lower() != "identity":  # a few bytes may decode to more than there is memory
                            raise InvalidRequest(f"{where}: the file came encoded ({encoding})", parameter=where)
                        data = bytearray()
                        async for block in response.aiter_raw():
                            data += block
                            if len(data) > limit:
                                raise TooLarge(f"{where}: the file is larger than {limit} bytes")
                        return bytes(data)
        except TimeoutError as error:
            seconds = self._settings.http_image_timeout_s
            raise InvalidRequest(f"{where}: the file was not fetched within {seconds:g} s", parameter=where) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise InvalidRequest(f"{where}: the file could not be fetched: {error}", parameter=where) from error
        raise InvalidRequest(f"{where}: more than {_MAX_REDIRECTS} redirects", parameter=where)

    def _check_domain(self, url: str, where: str) -> None:
        """Raise InvalidRequest for a URL, also one redirected to, of a host that is not allowed."""
        allowed = self._settings.allowed_media_domains
        host = _host_and_port(url, where)[0].rstrip(".")
        if allowed and host not in allowed:
            raise InvalidRequest(
                f"{where}: {host!r} is not among the hosts that files may be fetched from: {', '.join(allowed)} "
                "(`http.allowed_media_domains`)",
                parameter=where,
            )


def is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """True for an address of the public internet.

    Of an IPv4 address that is written as IPv6, the inner one counts.
    """
    if isinstance(address, ipaddress.IPv6Address):
        within = int(address) & 0xFFFFFFFF if address in _NAT64 else None
        inner = address.ipv4_mapped if within is None else ipaddress.IPv4Address(within)
        if inner is None:  # of those that routers unwrap, none is
            return address in _UNICAST and address.is_global and not (address.sixtofour or address.teredo)
        address = inner
    return address.is_global and not address.is_multicast


async def pinned(url: str, where: str) -> tuple[str, dict[str, str], dict[str, Any]]:
    """Resolve a URL's host once and aim the request at that address.

    No second look-up can change it then.

    Raises:
        InvalidRequest: the host is unknown, or any of its addresses is not a public one.
    """
    (host, port), parts = _host_and_port(url, where), urlsplit(url)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise InvalidRequest(f"{where}: unknown host {host!r}", parameter=where) from error
    addresses = [ipaddress.ip_address(entry[4][0]) for entry in found]
    if not addresses or not all(map(is_public, addresses)):
        raise InvalidRequest(f"{where}: {host!r} is not a public address", parameter=where)
    address = addresses[0]
    netloc = f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"
    return parts._replace(netloc=netloc).geturl(), {"Host": parts.netloc.rpartition("@")[2]}, {"sni_hostname": host}


def _host_and_port(url: str, where: str) -> tuple[str, int]:
    """Host in lower case and port of a URL; raises InvalidRequest if it is none."""
    try:
        parts = urlsplit(url)
        return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise InvalidRequest(f"{where}: not a URL: {error}", parameter=where) from error


def bytes_of_data_url(url: str, where: str, most: int) -> bytes:
    """Bytes of a data URL, at most `most`."""
    header, comma, payload = url.partition(",")
    if not comma or not header.endswith(";base64"):
        raise InvalidRequest(f"{where}: a data URL must be base64: data:image/png;base64,...", parameter=where)
    if len(payload) * 3 // 4 > most + 3:
        raise TooLarge(f"{where}: larger than {most} bytes")
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{where}: the data URL is not valid base64", parameter=where) from error
