"""Records the forms that real clients send: `python -m tests.http.recorded.record FOLDER`.

FOLDER has openai's package for Node in its node_modules (`npm i openai`). The body's bytes stand in
the file as latin-1.
"""

import base64
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from io import BytesIO
from pathlib import Path

import httpx
import openai

from tests.commands import run

FILE = Path(__file__).with_name("forms.json")
LINE = b'{"custom_id": "a1", "method": "POST", "url": "/v1/embeddings", "body": {"input": "\xc3\xa9"}}\n'
NODE = """
import OpenAI, { toFile } from "openai";
const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "k", maxRetries: 0 });
const line = Buffer.from(process.argv[3], "base64");
const file = () => toFile(line, "lines é.jsonl");
await client.files.create({ file: await file(), purpose: "batch",
  expires_after: { anchor: "created_at", seconds: 3600 } }).catch(() => 0);
await client.audio.transcriptions.create({ file: await file(), model: "m", language: "en",
  timestamp_granularities: ["word", "segment"] }).catch(() => 0);
const form = new FormData();
form.append("purpose", "batch");
form.append("file", new Blob([line]), "lines é.jsonl");
await fetch(process.argv[2] + "/v1/files", { method: "POST", body: form }).catch(() => 0);
"""

found: list[tuple[str, str]] = []


class Recorder(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        if self.headers.get("transfer-encoding"):
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers["content-length"]))
        found.append((self.headers["content-type"], body.decode("latin-1")))
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


def record(node: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
    client.files.create(
        file=("lines é.jsonl", BytesIO(LINE)),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    client.audio.transcriptions.create(
        file=("lines é.jsonl", LINE),
        model="m",
        language="en",
        timestamp_granularities=["word", "segment"],
    )
    httpx.post(f"{url}/v1/files", data={"purpose": "batch"}, files={"file": ("l.jsonl", LINE)})
    python = [f"openai-python {version('openai')}"] * 2 + [f"httpx {version('httpx')}"]
    (node / "lines.jsonl").write_bytes(LINE)
    curl = ["curl", "-s", f"{url}/v1/files", "-F", "purpose=batch", "-F", "file=@lines.jsonl"]
    run(*curl, cwd=node)
    of_curl = run("curl", "--version").split()[1]
    (node / "record.mjs").write_text(NODE)
    script = ["node", "record.mjs", url, base64.b64encode(LINE).decode()]
    run(*script, cwd=node)
    about = json.loads((node / "node_modules/openai/package.json").read_text())
    of_node = run("node", "--version").strip()
    names = [
        *python,
        f"curl {of_curl}",
        *[f"openai-node {about['version']}"] * 2,
        f"node {of_node}",
    ]
    forms = [
        {"client": name, "content_type": kind, "body": body}
        for name, (kind, body) in zip(names, found, strict=True)
    ]
    FILE.write_text(json.dumps(forms, indent=1) + "\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
