"""moto's S3 server in a process of its own: with Flask among its modules, a process cannot start a vLLM engine."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from infra.ports import free_port


@contextmanager
def s3_mock() -> Iterator[dict[str, Any]]:
    """`storage_options` of a running server without buckets."""
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", url.rpartition(":")[2]]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    httpx.get(url, trust_env=False)
                    break
                except httpx.TransportError:
                    assert server.poll() is None, "moto's server ended"
                    assert time.monotonic() < deadline, "moto's server does not answer"
                    time.sleep(0.05)
            yield {"key": "any", "secret": "any", "endpoint_url": url}
        finally:
            server.kill()
