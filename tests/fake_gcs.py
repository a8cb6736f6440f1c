"""A local fake of a Google Cloud Storage bucket, with the parts of its JSON API that gcsfs and tensorstore use.

Environment variables direct both to it, so that the tests run the same code as with a real bucket.
"""

import base64
import hashlib
import json
import re
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email import message_from_bytes
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

BUCKET = "bucket"
DROPPED = -1


class FakeBucket:
    """Objects by name. `refuse(method, name)` may return an HTTP status to answer with instead; with `DROPPED`, the
    connection ends in the middle of the answer."""

    def __init__(self):
        self.objects: dict[str, tuple[bytes, int]] = {}
        """Content and generation."""
        self.refuse: Callable[[str, str], int | None] = lambda method, name: None
        self.generation = 0
        self.sent = 0
        """The number of bytes of contents that were read."""
        self.uploads: dict[str, tuple[str, bytes]] = {}
        self.lock = threading.Lock()

    def put(self, name: str, content: bytes) -> dict:
        with self.lock:
            self.generation += 1
            self.objects[name] = content, self.generation
        return self.describe(name)

    def describe(self, name: str) -> dict:
        content, generation = self.objects[name]
        return {
            "kind": "storage#object",
            "name": name,
            "id": f"{BUCKET}/{name}/{generation}",
            "bucket": BUCKET,
            "size": str(len(content)),
            "generation": str(generation),
            "metageneration": "1",
            "updated": "2026-01-01T00:00:00.000Z",
            "timeCreated": "2026-01-01T00:00:00.000Z",
            "md5Hash": base64.b64encode(hashlib.md5(content).digest()).decode(),
        }


class Answers(BaseHTTPRequestHandler):
    """A server's answers, with JSON or bytes."""

    protocol_version = "HTTP/1.1"
    # Otherwise the content waits until the client acknowledges the headers, which it delays.
    disable_nagle_algorithm = True

    def log_message(self, *_) -> None:
        pass

    def answer(self, status: int, content: bytes | dict | list = b"", **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class Handler(Answers):
    bucket: FakeBucket

    def handle_one(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = parts.path
        name = unquote(match[1]) if (match := re.search(r"/o/(.+)$", path)) else query.get("name", "")
        if match := re.search(r"/o/(.+?)/(rewrite|copy|move)To/(?:b/[^/]+/)?o/(.+)$", path):
            return self.copy(unquote(match[1]), match[2], unquote(match[3]))
        if path.endswith("/batch/storage/v1") or path == "/batch/storage/v1":
            return self.batch(body)
        if (status := self.bucket.refuse(self.command, name)) == DROPPED:
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"half")
            self.close_connection = True
            return None
        if status:
            return self.answer(status, {"error": {"code": status, "message": "refused by the test"}})
        if "/upload/" in path:
            return self.upload(query, name, body)
        if self.command in ("GET", "HEAD"):
            if re.search(r"/b/[^/]+$", path):
                return self.answer(200, {"kind": "storage#bucket", "name": BUCKET, "id": BUCKET})
            if re.search(r"/b/[^/]+/o/?$", path):
                return self.list(query)
            return self.read(query, name)
        if self.command == "DELETE":
            found = self.bucket.objects.pop(name, None)
            return self.answer(204 if found else 404)
        if self.command in ("PATCH", "PUT"):
            return self.answer(200, self.bucket.describe(name))
        return self.answer(501)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = handle_one

    def copy(self, source: str, kind: str, target: str) -> None:
        if source not in self.bucket.objects:
            return self.answer(404, {"error": {"code": 404, "message": "not found"}})
        resource = self.bucket.put(target, self.bucket.objects[source][0])
        if kind == "move":
            del self.bucket.objects[source]
        size = resource["size"]
        done = {"done": True, "resource": resource, "totalBytesRewritten": size, "objectSize": size}
        return self.answer(200, done if kind == "rewrite" else resource)

    def read(self, query: dict, name: str) -> None:
        if name not in self.bucket.objects:
            return self.answer(404, {"error": {"code": 404, "message": "not found"}})
        content, generation = self.bucket.objects[name]
        if query.get("alt") != "media" and "/download/" not in self.path:
            return self.answer(200, self.bucket.describe(name))
        if query.get("ifGenerationNotMatch") == str(generation):
            return self.answer(304)
        status, headers = 200, {}
        if match := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
            first = int(match[1]) if match[1] else len(content) - int(match[2])
            last = int(match[2]) if match[1] and match[2] else len(content) - 1
            if first >= len(content) and content:
                return self.answer(416)
            last = min(last, len(content) - 1)
            headers["Content_Range"] = f"bytes {first}-{last}/{len(content)}"
            status, content = 206, content[first : last + 1]
        self.bucket.sent += len(content)
        return self.answer(status, content, x_goog_generation=str(generation), **headers)

    def list(self, query: dict) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        items, prefixes = [], set()
        for name in sorted(self.bucket.objects):
            if not name.startswith(prefix) or name < query.get("startOffset", ""):
                continue
            if query.get("endOffset") and name >= query["endOffset"]:
                continue
            head, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
            if found:
                prefixes.add(prefix + head + delimiter)
            else:
                items.append(self.bucket.describe(name))
        self.answer(200, {"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)})

    def upload(self, query: dict, name: str, body: bytes) -> None:
        kind = query.get("uploadType")
        if kind == "resumable" and self.command == "POST" and "upload_id" not in query:
            name = name or json.loads(body)["name"]
            key = uuid.uuid4().hex
            self.bucket.uploads[key] = (name, b"")
            host = self.headers["Host"]
            place = f"http://{host}/upload/storage/v1/b/{BUCKET}/o?uploadType=resumable&upload_id={key}"
            return self.answer(200, Location=place)
        if kind == "resumable":
            name, before = self.bucket.uploads[query["upload_id"]]
            if status := self.bucket.refuse("POST", name):
                return self.answer(status, {"error": {"code": status, "message": "refused by the test"}})
            content = before + body
            self.bucket.uploads[query["upload_id"]] = (name, content)
            if self.headers.get("Content-Range", "").endswith("/*"):
                return self.answer(308, Range=f"bytes=0-{len(content) - 1}")
            return self.answer(200, self.bucket.put(name, content))
        if kind == "multipart":
            whole = message_from_bytes(b"Content-Type: " + self.headers["Content-Type"].encode() + b"\r\n\r\n" + body)
            about, content = whole.get_payload()
            boundary = whole.get_boundary().encode()
            # The mail parser changes line ends: the content is what stands between its headers and the boundary.
            raw = body.split(b"--" + boundary)[2].split(b"\r\n\r\n", 1)[1][:-2]
            name = json.loads(about.get_payload())["name"]
            if status := self.bucket.refuse("POST", name):
                return self.answer(status, {"error": {"code": status, "message": "refused by the test"}})
            return self.answer(200, self.bucket.put(name, raw))
        wanted = query.get("ifGenerationMatch")
        present = self.bucket.objects.get(name)
        if wanted is not None and wanted != str(present[1] if present else 0):
            return self.answer(412)
        return self.answer(200, self.bucket.put(name, body))

    def batch(self, body: bytes) -> None:
        boundary = re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])[1].encode()
        parts = []
        for part in body.split(b"--" + boundary)[1:-1]:
            identifier = re.search(rb"Content-ID: <?([^>\r\n]+)", part)[1].decode()
            path = re.search(rb"DELETE (\S+)", part)[1].decode()
            name = unquote(re.search(r"/o/([^? ]+)", path)[1])
            status = "204 No Content" if self.bucket.objects.pop(name, None) else "404 Not Found"
            parts.append(
                f"--batch_x\r\nContent-Type: application/http\r\nContent-ID: <response-{identifier}>\r\n\r\n"
                f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n\r\n"
            )
        answer = ("".join(parts) + "--batch_x--\r\n").encode()
        self.answer(200, answer, Content_Type="multipart/mixed; boundary=batch_x")


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address) -> None:
        # A client may not wait for an answer that it no longer needs, and end the connection at any time.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def fake_gcs(monkeypatch) -> Iterator[FakeBucket]:
    """Serves an empty bucket to this process and its subprocesses, for the duration of a `with` statement."""
    bucket = FakeBucket()
    handler = type("BoundHandler", (Handler,), {"bucket": bucket})
    server = Server(("localhost", 0), handler)
    address = f"http://localhost:{server.server_address[1]}"
    # gcsfs and google-cloud-storage; tensorstore.
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "project")
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", address)
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "token")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield bucket
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def server():
    """One for all tests of a module: gcsfs remembers the address of the first."""
    with pytest.MonkeyPatch.context() as monkeypatch, fake_gcs(monkeypatch) as bucket:
        yield bucket


@pytest.fixture
def bucket(server):
    server.objects.clear()
    yield server
    server.refuse = lambda method, name: None
