"""A model hub on this machine: the routes by which `huggingface_hub` creates, fills, lists and reads a repository.

Repositories live in memory and every commit is kept. Whoever writes must show TOKEN; large files come by the LFS
protocol and are checked against their hash. `refusals` are tested first: `hub.refusals["PUT /lfs"] = 507`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml
from huggingface_hub import HfApi, ModelCard, constants
from huggingface_hub.utils import validate_repo_id

TOKEN = "hf_loopback"
LARGE = (".safetensors", ".bin", ".png")  # what a new repository of the Hub tracks by LFS
PIPELINES = {"text-generation", "text-classification", "feature-extraction", "image-classification"}


@dataclass
class Commit:
    message: str
    files: dict[str, bytes]
    large: set[str]  # paths
    oid: str


@dataclass
class Repository:
    private: bool
    commits: list[Commit] = field(default_factory=lambda: [Commit("initial commit", {}, set(), "0" * 40)])

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1].files

    def at(self, revision: str) -> Commit | None:
        if revision == "main":
            return self.commits[-1]
        return next((commit for commit in self.commits if commit.oid == revision), None)


class Hub(ThreadingHTTPServer):
    """The server with what it holds."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Routes)
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.refusals: dict[str, int] = {}
        self.requests: list[str] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def environment(self, home, token: str | None = TOKEN) -> dict[str, str]:
        """What a process must have in its environment to know no other hub."""
        settings = {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
        settings |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        return settings if token is None else settings | {"HF_TOKEN": token}


def metadata_problem(content: str) -> str | None:
    """What is wrong with the metadata of a model card, by the client's own parser."""
    try:
        card = ModelCard(content)
        metadata = yaml.safe_load(card.data.to_yaml())
    except (ValueError, yaml.YAMLError) as error:
        return str(error)
    if not isinstance(metadata.get("license", ""), str):
        return '"license" must be a string'
    pipeline = metadata.get("pipeline_tag")
    if pipeline is not None and pipeline not in PIPELINES:
        return f'"pipeline_tag" must be one of {sorted(PIPELINES)}, not {pipeline}'
    for name in ("tags", "language", "datasets"):
        values = metadata.get(name) or []
        if not all(isinstance(value, str) for value in ([values] if isinstance(values, str) else values)):
            return f'"{name}" must be a list of strings'
    if "model-index" in metadata and not card.data.eval_results:
        return '"model-index" holds no results'
    return None


class Routes(BaseHTTPRequestHandler):
    """One method a route, found by its verb and pattern."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        self.server.requests.append(f"{self.command} {self.path}")

    def handle_any(self):
        self.body = self.read_body()
        path = unquote(urlsplit(self.path).path)
        for start, status in self.server.refusals.items():
            if f"{self.command} {path}".startswith(start):
                return self.answer({"error": "refused"}, status)
        for verb, pattern, method in ROUTES:
            if (found := re.fullmatch(pattern, path)) and verb == self.command:
                if verb != "GET" and not self.may_write(path):
                    return self.answer({"error": "Invalid username or password."}, 401)
                return method(self, **found.groupdict())
        return self.answer({"error": f"unknown route {self.command} {path}"}, 404)

    do_GET = do_POST = do_PUT = do_HEAD = handle_any

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def may_write(self, path: str) -> bool:
        # What a signed upload address hides, and the public check of a card, need no token.
        public = self.command == "HEAD" or path.startswith("/lfs/") or path == "/api/validate-yaml"
        return public or self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def answer(self, body, status: int = 200, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def repository(self, repo: str) -> Repository | None:
        """The repository, or None after an answer that it does not exist for whoever asks."""
        found = self.server.repositories.get(repo)
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if found is None or (found.private and not known):
            self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
            return None
        return found

    def whoami(self):
        self.answer({"name": "user", "type": "user", "orgs": []})

    def create(self):
        wanted = json.loads(self.body)
        repo = f"{wanted['organization'] or 'user'}/{wanted['name']}"
        validate_repo_id(repo)
        address = {"url": f"{self.server.endpoint}/{repo}"}
        if repo in self.server.repositories:
            return self.answer(address | {"error": "You already created this model repo"}, 409)
        self.server.repositories[repo] = Repository(private=wanted.get("visibility") == "private")
        return self.answer(address)

    def validate_card(self):
        problem = metadata_problem(json.loads(self.body)["content"])
        if problem is None:
            return self.answer({"errors": [], "warnings": []})
        return self.answer({"error": problem, "errors": [{"message": problem}], "warnings": []}, 400)

    def preupload(self, repo: str, revision: str):
        if (repository := self.repository(repo)) is None:
            return
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                "shouldIgnore": False,
                "oid": blob_oid(repository.files[file["path"]]) if file["path"] in repository.files else None,
            }
            for file in json.loads(self.body)["files"]
        ]
        self.answer({"files": files})

    def lfs_batch(self, repo: str):
        objects = json.loads(self.body)["objects"]
        for item in objects:
            if item["oid"] not in self.server.objects:
                item["actions"] = {"upload": {"href": f"{self.server.endpoint}/lfs/{item['oid']}"}}
        self.answer({"transfer": "basic", "objects": objects})

    def lfs_upload(self, oid: str):
        if hashlib.sha256(self.body).hexdigest() != oid:
            return self.answer({"error": "the content is not that of the hash"}, 400)
        self.server.objects[oid] = self.body
        return self.answer({})

    def commit(self, repo: str, revision: str):
        if (repository := self.repository(repo)) is None:
            return
        last, message = repository.commits[-1], ""
        files, large = dict(last.files), set(last.large)
        for line in self.body.splitlines():
            item = json.loads(line)
            kind, value = item["key"], item["value"]
            path = value.get("path")
            if kind == "header":
                message = value["summary"]
            elif kind == "file":
                files[path] = base64.b64decode(value["content"])
                large.discard(path)
            elif kind == "lfsFile":
                if value["oid"] not in self.server.objects:
                    return self.answer({"error": f"{path} was never uploaded"}, 400)
                files[path] = self.server.objects[value["oid"]]
                large.add(path)
            elif kind == "deletedFile":
                del files[path]
        history = f"{len(repository.commits)} {message}".encode()
        oid = hashlib.sha1(history + b"".join(blob_oid(data).encode() for data in files.values())).hexdigest()
        repository.commits.append(Commit(message, files, large, oid))
        answer = {"commitUrl": f"{self.server.endpoint}/{repo}/commit/{oid}", "commitOid": oid, "pullRequestUrl": None}
        return self.answer(answer)

    def info(self, repo: str, revision: str = "main"):
        if (repository := self.repository(repo)) is None:
            return None
        if (commit := repository.at(revision)) is None:
            return self.answer({"error": "Invalid rev id"}, 404, X_Error_Code="RevisionNotFound")
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        facts = {"id": repo, "modelId": repo, "sha": commit.oid, "private": repository.private, "siblings": siblings}
        return self.answer(facts | {"tags": [], "downloads": 0, "likes": 0})

    def tree(self, repo: str, revision: str, under: str | None = None):
        if (repository := self.repository(repo)) is None:
            return None
        if (commit := repository.at(revision)) is None:
            return self.answer({"error": "Invalid rev id"}, 404, X_Error_Code="RevisionNotFound")
        paths = [path for path in sorted(commit.files) if under is None or path.startswith(f"{under}/")]
        if under is not None and not paths:
            return self.answer({"error": "not found"}, 404, X_Error_Code="EntryNotFound")
        return self.answer([self.entry(commit, path) for path in paths])

    def entry(self, commit: Commit, path: str) -> dict:
        data = commit.files[path]
        entry = {"type": "file", "path": path, "size": len(data), "oid": blob_oid(data)}
        if path in commit.large:
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return entry

    def resolve(self, repo: str, revision: str, path: str):
        if (repository := self.repository(repo)) is None:
            return None
        if (commit := repository.at(revision)) is None:
            return self.answer({"error": "Invalid rev id"}, 404, X_Error_Code="RevisionNotFound")
        if path not in commit.files:
            return self.answer({}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit.oid)
        data = commit.files[path]
        large = path in commit.large
        etag = hashlib.sha256(data).hexdigest() if large else blob_oid(data)
        return self.answer(data, ETag=f'"{etag}"', X_Repo_Commit=commit.oid)


def blob_oid(data: bytes) -> str:
    """As git names the content of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


REPO, REVISION = r"(?P<repo>[^/]+/[^/]+)", r"(?P<revision>[^/]+)"
ROUTES = [
    ("GET", "/api/whoami-v2", Routes.whoami),
    ("POST", "/api/repos/create", Routes.create),
    ("POST", "/api/validate-yaml", Routes.validate_card),
    ("POST", f"/api/models/{REPO}/preupload/{REVISION}", Routes.preupload),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", Routes.lfs_batch),
    ("PUT", "/lfs/(?P<oid>[0-9a-f]{64})", Routes.lfs_upload),
    ("POST", f"/api/models/{REPO}/commit/{REVISION}", Routes.commit),
    ("GET", f"/api/models/{REPO}", Routes.info),
    ("GET", f"/api/models/{REPO}/revision/{REVISION}", Routes.info),
    ("GET", f"/api/models/{REPO}/tree/{REVISION}(/(?P<under>.+))?", Routes.tree),
    ("GET", f"/{REPO}/resolve/{REVISION}/(?P<path>.+)", Routes.resolve),
    ("HEAD", f"/{REPO}/resolve/{REVISION}/(?P<path>.+)", Routes.resolve),
]


@contextmanager
def running_hub():
    """A hub that answers while the block runs."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


def speak_to(hub: Hub, module, monkeypatch) -> None:
    """This process, and `HfApi` of a module, speak to the hub with the right to write until the test ends."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(module, "HfApi", lambda: HfApi(endpoint=hub.endpoint))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.refusals.clear()
