"""A Hugging Face Hub on the loopback: what huggingface_hub asks of it, and no more."""

import hashlib
import http.server
import json
import threading
from pathlib import Path

COMMIT = hashlib.sha1(b"main").hexdigest()


def serve(models):
    """Starts the server. `models`: name -> folder, or an int, the HTTP status it answers with.
    Returns its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def answer(self, status, body=b"", **headers):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            if "Content_Length" not in headers:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self):
            path = self.path.partition("?")[0]
            for name, folder in models.items():
                api, files = f"/api/models/{name}", f"/{name}/resolve/"
                if path == api or path.startswith((f"{api}/", files)):
                    if isinstance(folder, int):
                        code = {401: "RepoNotFound", 403: "GatedRepo"}[folder]
                        return self.answer(folder, b"{}", X_Error_Code=code)
                    if path.startswith(files):
                        return self.file(folder, *path.removeprefix(files).split("/", 1))
                    return self.about(name, folder, path.removeprefix(api).strip("/"))
            return self.answer(401, b"{}", X_Error_Code="RepoNotFound")

        do_HEAD = do_GET

        def about(self, name, folder, path):
            kind, _, revision = path.partition("/")
            if (revision or "main") not in ("main", COMMIT):
                return self.answer(404, b"{}", X_Error_Code="RevisionNotFound")
            files = sorted(Path(folder).iterdir())
            if kind == "tree":
                found = [
                    {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": oid(f)}
                    for f in files
                ]
            else:
                siblings = [{"rfilename": f.name} for f in files]
                found = {"id": name, "sha": COMMIT, "siblings": siblings, "private": False}
            body = json.dumps(found).encode()
            return self.answer(200, body, Content_Type="application/json")

        def file(self, folder, revision, name):
            path = Path(folder) / name
            if revision not in ("main", COMMIT):
                return self.answer(404, b"", X_Error_Code="RevisionNotFound")
            if not path.is_file():
                return self.answer(404, b"", X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
            body = path.read_bytes()
            return self.answer(200, body, ETag=f'"{oid(path)}"', X_Repo_Commit=COMMIT)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def oid(path):
    return hashlib.sha1(path.read_bytes()).hexdigest()
