"""A Hugging Face Hub on the loopback: what huggingface_hub asks of it, and no more."""

import hashlib
import http.server
import json
import threading

COMMIT = hashlib.sha1(b"main").hexdigest()
ERRORS = {401: "RepoNotFound", 403: "GatedRepo"}


def serve(models):
    """Starts the server. `models`: name -> folder, or an int, the HTTP status it answers with.
    Returns its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def answer(self, status, body=b"", **headers):
            self.send_response(status)
            for name, value in ({"Content_Length": str(len(body))} | headers).items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self):
            path = self.path.partition("?")[0].removeprefix("/api/models")
            name = next((one for one in models if f"{path}/".startswith(f"/{one}/")), "")
            folder = models.get(name, 401)
            if isinstance(folder, int):
                return self.answer(folder, b"{}", X_Error_Code=ERRORS[folder])
            kind, _, rest = path.removeprefix(f"/{name}").strip("/").partition("/")
            revision, _, file = rest.partition("/")
            if (revision or "main") not in ("main", COMMIT):
                return self.answer(404, b"{}", X_Error_Code="RevisionNotFound")
            if kind == "resolve":
                return self.file(folder / file)
            files = sorted(folder.iterdir())
            found = {"id": name, "sha": COMMIT, "private": False}
            found |= {"siblings": [{"rfilename": one.name} for one in files]}
            if kind == "tree":
                found = [
                    {"type": "file", "path": one.name, "size": one.stat().st_size, "oid": COMMIT}
                    for one in files
                ]
            return self.answer(200, json.dumps(found).encode(), Content_Type="application/json")

        do_HEAD = do_GET

        def file(self, path):
            if not path.is_file():
                return self.answer(404, b"", X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
            body = path.read_bytes()
            tag = hashlib.sha1(body).hexdigest()
            return self.answer(200, body, ETag=f'"{tag}"', X_Repo_Commit=COMMIT)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"
