"""Local stand-ins for the model hub and for a package index, and data wheels to serve."""

from __future__ import annotations

import hashlib
import re
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.support.waiting import PATIENCE

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Server:
    """Serves files by path over HTTP, with ranges; can stop in the middle, drop connections, hang, or refuse."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}  # URL path -> content
        self.digests: dict[str, str] = {}  # URL path -> digest to announce instead of the true one; "" announces none
        self.hold_after = 0  # bytes of a content after which sending stops until ``go_on`` is set; 0 never
        self.go_on = threading.Event()
        self.drop_after = 0  # bytes after which the connection breaks, once per request; 0 never
        self.status = 0  # answer everything with this status; 0 serves
        self.hang = False  # accept requests and never answer
        self.ranges = True  # whether ranges are given; else every answer is the whole file
        self.short = self.long = 0  # bytes that are sent less, or more, than a HEAD request was told
        self.sizes: dict[str, int | None] = {}  # URL path -> size to tell a HEAD request instead; None tells none
        self.requests: list[tuple[str, str, int]] = []  # (method, path, first byte asked for) in order
        self._stopped = threading.Event()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                owner._answer(self, body=True)

            def do_HEAD(self) -> None:
                owner._answer(self, body=False)

            def log_message(self, format: str, *args: Any) -> None: ...

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None: ...  # killed clients are the point

        self._http = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._stopped.set()
        self.go_on.set()
        self._http.shutdown()
        self._http.server_close()

    def _answer(self, request: BaseHTTPRequestHandler, *, body: bool) -> None:
        first = int((re.match(r"bytes=(\d+)-", request.headers.get("Range") or "") or [0, 0])[1])
        path = request.path.partition("?")[0].partition("#")[0]
        self.requests.append((request.command, path, first))
        first = first if self.ranges else 0
        if self.hang:
            self._stopped.wait(PATIENCE)
            request.close_connection = True
            return
        content = self.files.get(path)
        status = self.status or (404 if content is None else 206 if first else 200)
        if content is None or status >= 300:
            request.send_response(status)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        if body:
            content = content[: len(content) - self.short] + bytes(self.long)
        request.send_response(status)
        digest = self.digests.get(path, hashlib.sha256(self.files[path]).hexdigest())
        request.send_header("ETag", f'"{digest or "weak"}"')
        request.send_header("X-Repo-Commit", COMMIT)
        request.send_header("Accept-Ranges", "bytes")
        request.send_header("Content-Type", "text/html" if path.endswith("/") else "application/octet-stream")
        size = len(content) - first if body else self.sizes.get(path, len(content) - first)
        if size is not None:
            request.send_header("Content-Length", str(size))
        if first:
            request.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        request.end_headers()
        if body:
            self._send(request, content[first:])

    def _send(self, request: BaseHTTPRequestHandler, content: bytes) -> None:
        sent = 0
        try:
            for at in range(0, len(content), 1 << 16):
                if self.hold_after and sent >= self.hold_after:
                    request.wfile.flush()
                    self.go_on.wait(PATIENCE)
                if self.drop_after and sent >= self.drop_after:
                    request.close_connection = True
                    request.wfile.flush()
                    request.connection.shutdown(2)
                    return
                request.wfile.write(content[at : at + (1 << 16)])
                sent += 1 << 16
        except OSError:
            request.close_connection = True  # the client went away, as the test wants

    def served(self, path: str) -> list[int]:
        """For each time the content of a path was sent, the first byte."""
        return [first for method, there, first in self.requests if method == "GET" and there == path]


def write_wheel(folder: Path, name: str, version: str, member: str, content: bytes) -> Path:
    """A data wheel in the manner of those in the catalogue."""
    plain = name.replace("-", "_")
    path = folder / f"{plain}-{version}-py3-none-any.whl"
    info = f"{plain}-{version}.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(f"{plain}/__init__.py", "raise SystemExit('a data wheel must not be run')")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def serve_index(server: Server, wheels: list[Path]) -> str:
    """Put wheels on a server as a package index. Returns the index's address."""
    for path in wheels:
        name = path.name.split("-")[0].replace("_", "-")
        server.files[f"/simple/{name}/"] = f'<a href="/files/{path.name}">{path.name}</a>'.encode()
        server.files[f"/files/{path.name}"] = path.read_bytes()
    return f"{server.url}/simple"
