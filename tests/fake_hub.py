"""A local fake of the Hugging Face Hub: repositories, with the parts of its HTTP interface that reading needs."""

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from fake_gcs import Answers
from huggingface_hub import constants


class FakeHub:
    """The files of each repository, `datasets/ORG/NAME` or `models/ORG/NAME`, by revision and path."""

    def __init__(self):
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.commits: dict[tuple[str, str], str] = {}
        self.downloads: Counter[str] = Counter()
        """The number of requests for the content of each file."""

    def put(self, repository: str, files: dict[str, bytes], revision: str = "main") -> str:
        """Makes a commit of exactly these files, and returns its id."""
        content = repr(sorted((name, hashlib.sha1(data).hexdigest()) for name, data in files.items()))
        commit = hashlib.sha1(content.encode()).hexdigest()
        self.repositories.setdefault(repository, {}).update({revision: files, commit: files})
        self.commits[repository, revision] = self.commits[repository, commit] = commit
        return commit


def entry(path: str, content: bytes) -> dict:
    sha256 = hashlib.sha256(content).hexdigest()
    about = {"type": "file", "oid": hashlib.sha1(content).hexdigest(), "size": len(content), "path": path}
    # As on the Hub, only large files (here all that are no text) are in its store of large files.
    is_large = path.endswith((".parquet", ".gz", ".safetensors"))
    return about | ({"lfs": {"oid": sha256, "size": len(content), "pointerSize": 130}} if is_large else {})


class Handler(Answers):
    hub: FakeHub

    def handle_one(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlsplit(self.path).path
        if match := re.fullmatch(r"/api/(\w+/[^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?", path):
            repository, what, revision, below = match[1], match[2], unquote(match[3] or "main"), unquote(match[4] or "")
            files = self.files(repository, revision)
            if files is None:
                return self.missing(repository)
            if what == "tree":
                return self.tree(files, below)
            if what == "paths-info":
                wanted = json.loads(body)["paths"] if body.startswith(b"{") else []
                wanted = wanted or [unquote(part[6:]) for part in body.decode().split("&") if part.startswith("paths=")]
                return self.answer(200, [entry(path, files[path]) for path in wanted if path in files])
            commit = self.hub.commits[repository, revision]
            siblings = [{"rfilename": path} for path in files]
            return self.answer(
                200, {"id": repository.split("/", 1)[1], "sha": commit, "siblings": siblings, "tags": []}
            )
        if match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            repository, revision, name = f"{match[1] or 'models/'}{match[2]}", unquote(match[3]), unquote(match[4])
            files = self.files(repository, revision)
            if files is None or name not in files:
                return self.missing(repository, files is not None)
            return self.content(files[name], name, self.hub.commits[repository, revision])
        return self.answer(501)

    do_GET = do_HEAD = do_POST = handle_one

    def files(self, repository: str, revision: str) -> dict[str, bytes] | None:
        return self.hub.repositories.get(repository, {}).get(revision)

    def missing(self, repository: str, is_entry: bool = False) -> None:
        code = "EntryNotFound" if is_entry else "RevisionNotFound" if repository in self.hub.repositories else ""
        self.answer(404, {"error": "not found"}, X_Error_Code=code or "RepoNotFound", X_Error_Message="not found")

    def tree(self, files: dict[str, bytes], below: str) -> None:
        recursive, prefix = "recursive=True" in self.path or "recursive=true" in self.path, f"{below}/" if below else ""
        entries, folders = [], set()
        for path in sorted(path for path in files if path.startswith(prefix)):
            parts = path[len(prefix) :].split("/")
            folders |= {prefix + "/".join(parts[: i + 1]) for i in range(len(parts) - 1 if recursive else 1)} - {path}
            entries += [entry(path, files[path])] if recursive or len(parts) == 1 else []
        if below and not entries and not folders:
            return self.answer(404, {"error": "not found"}, X_Error_Code="EntryNotFound")
        return self.answer(
            200, entries + [{"type": "directory", "oid": "0" * 40, "size": 0, "path": f} for f in folders]
        )

    def content(self, content: bytes, name: str, commit: str) -> None:
        about = entry(name, content)
        headers = {"ETag": f'"{about.get("lfs", about)["oid"]}"', "X_Repo_Commit": commit, "Accept_Ranges": "bytes"}
        headers |= {"X_Linked_Size": str(len(content))}
        self.hub.downloads[name] += self.command == "GET"
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(match[1]), min(int(match[2] or len(content)), len(content) - 1)
            span = f"bytes {first}-{last}/{len(content)}"
            return self.answer(206, content[first : last + 1], Content_Range=span, **headers)
        return self.answer(200, content, **headers)


@contextmanager
def fake_hub(monkeypatch, cache) -> Iterator[FakeHub]:
    """Serves an empty hub to this process, for the duration of a `with` statement, with an empty cache folder."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("localhost", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    address = f"http://localhost:{server.server_address[1]}"
    # The library reads the environment once, when it is imported.
    monkeypatch.setattr(constants, "ENDPOINT", address)
    # Other tests of the process may keep libraries from asking the Hub.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
