"""A Hugging Face hub of folders, served over HTTP on this machine."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """A hub.

    Attributes:
        root: folder of repositories: ORG/NAME, and datasets/ORG/NAME.
        address: what HF_ENDPOINT names.
        gated: repositories whose licence nobody has accepted.
        lost: names of files that are listed and cannot be had.
        asked: how often each path was asked for.
    """

    root: Path
    address: str = ""
    gated: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    asked: Counter[str] = field(default_factory=Counter)

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and content of what is at a path."""
        self.asked[path] += 1
        words = path.strip("/").split("/")
        if words[:2] == ["api", "models"]:
            return self._listing("/".join(words[2:4]), *words[4:])
        if words[:2] == ["api", "datasets"]:
            return self._listing("/".join(["datasets", *words[2:4]]), *words[4:])
        repo, _, inner = path.strip("/").partition("/resolve/")
        file = self.root / repo / inner.partition("/")[2]
        if not file.is_file() or file.name in self.lost:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        content = file.read_bytes()
        return 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{sha1(content).hexdigest()}"'}, content

    def _listing(
        self, repo: str, what: str = "revision", revision: str = "main"
    ) -> tuple[int, dict[str, str], bytes]:
        """The `revision` of a repository with its files, or these alone, as a `tree`."""
        folder = self.root / repo
        if repo in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        if not folder.is_dir():
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        if revision not in ("main", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        names = [str(file.relative_to(folder)) for file in files]
        siblings = [{"rfilename": name} for name in names]
        said: Any = {"id": repo, "sha": COMMIT, "siblings": siblings}
        if what == "tree":
            sizes = [file.stat().st_size for file in files]
            said = [
                {"type": "file", "path": name, "size": size, "oid": COMMIT}
                for name, size in zip(names, sizes, strict=True)
            ]
        return 200, {"Content-Type": "application/json"}, json.dumps(said).encode()


@contextmanager
def serving(root: Path) -> Iterator[Hub]:
    """A hub, as long as the block lasts."""
    hub = Hub(root)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, content = hub.answer(self.path.partition("?")[0])
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
