"""A model hub on loopback, as far as its client asks: a repository's files, their list, and what is sent when."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pytest

COMMIT = "c" * 40
REPOSITORY = "org/model"


class Hub:
    """What the hub has and what was taken from it.

    Args:
        files: the repository's files by path.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = dict(files)
        self.sent: list[str] = []
        self.closed = False
        self.broken: set[str] = set()
        """Files at which the line breaks."""


@contextmanager
def hub(files: Mapping[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that this process's client talks to."""
    made = Hub(files)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": made}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
        address + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    def _answer(self, body: bool) -> None:
        path = unquote(self.path.split("?")[0])
        files = self.hub.files
        if path.startswith(f"/api/models/{REPOSITORY}/revision/"):
            listed = [{"rfilename": name} for name in sorted(files)]
            self._send(json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": listed}).encode(), "", body)
        elif path.startswith(f"/api/models/{REPOSITORY}/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            self._send(json.dumps(tree).encode(), "", body)
        elif path.startswith(f"/{REPOSITORY}/resolve/") and (name := path.split("/", 5)[5]) in files:
            if self.hub.closed:
                self._refuse(403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to it is restricted."})
                return
            if body and name in self.hub.broken:
                self.close_connection = True
                self.connection.close()
                return
            if body:
                self.hub.sent.append(name)
            self._send(files[name], hashlib.sha1(files[name]).hexdigest(), body)
        else:
            self._refuse(404, {"X-Error-Code": "EntryNotFound" if "resolve" in path else "RepoNotFound"})

    def _send(self, data: bytes, etag: str, body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        if etag:
            self.send_header("ETag", f'"{etag}"')
            self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def _refuse(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()
