"""A Hugging Face hub of a few models, over HTTP: what `snapshot_download` asks of one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Models of a hub, and the paths that it was asked for.

    Args:
        models: files by name, by ORGANISATION/NAME.
        gated: models that are refused.
    """

    def __init__(self, models: Mapping[str, Mapping[str, bytes]], gated: tuple[str, ...] = ()) -> None:
        self.models, self.gated, self.asked = models, gated, list[str]()
        self.url = ""


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    """The hub on a port of its own, served by a thread."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = urlsplit(self.path).path.strip("/")
            hub.asked.append(path)
            api = path.startswith("api/models/")
            organisation, name, *rest = path.removeprefix("api/models/").split("/")
            model = f"{organisation}/{name}"
            if model in hub.gated and not api:
                self._answer(403, b"", {"X-Error-Code": "GatedRepo"})
            elif model not in hub.models:
                self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
            elif api and rest[:1] == ["tree"]:
                files = hub.models[model].items()
                listed = [
                    {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for file, data in files
                ]
                self._answer(200, json.dumps(listed).encode())
            elif api:
                self._answer(200, json.dumps({"id": model, "sha": COMMIT, "siblings": []}).encode())
            else:  # resolve/COMMIT/FILE
                data = hub.models[model]["/".join(rest[2:])]
                self._answer(200, data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT})

        do_HEAD = do_GET

        def _answer(self, status: int, data: bytes, headers: Mapping[str, str] | None = None) -> None:
            self.send_response(status)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Nothing is logged."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
