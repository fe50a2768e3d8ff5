"""A server as a process that speaks just enough HTTP, and misbehaves on request.

    python bench_server.py

It prints its port. `model` says what happens: `fine`, `full` (always 429), `busy` (429 every second time, but
for the first two), `dies` (the process ends in the middle of its tenth answer), `garbage` (no JSON), `html`
(no HTTP), `strict` (refuses fields that aren't OpenAI's), `silent` (no usage), `closes` (no keep-alive),
`drops` (closes after an answer without saying so, when the next request is out), `stalls` (from the seventh
request on only those with the key `go` are answered).
"""

import json
import os
import socketserver
import sys
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any

COUNT = {"requests": 0}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *words: Any) -> None:
        return None

    def do_GET(self) -> None:
        if self.headers.get("Authorization") == "Bearer wrong":
            self.whole(401, {"error": {"message": "no"}})
            return
        self.whole(200, {"object": "list", "data": [{"id": "fine"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        COUNT["requests"] += 1
        kind, number = body["model"], COUNT["requests"]
        if kind == "stalls" and number > 6 and self.headers.get("Authorization") != "Bearer go":
            threading.Event().wait()
        if kind == "strict" and "ignore_eos" in body:
            self.whole(400, {"error": {"message": "unknown field ignore_eos"}})
            return
        if kind == "full" or (kind == "busy" and number > 2 and number % 2):
            self.whole(429, {"error": {"message": "busy"}}, {"Retry-After": "0"})
            return
        if kind == "html" and number > 2:
            self.wfile.write(b"<html>nonsense</html>\r\n\r\n")
            self.close_connection = True
            return
        self.stream(body, kind, number)

    def stream(self, body: dict[str, Any], kind: str, number: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        if kind == "closes":
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        for index in range(body["max_tokens"]):
            if kind == "dies" and number == 10 and index == 2:
                self.wfile.flush()
                os._exit(1)
            if kind == "garbage" and number > 2 and index == 2:
                self.chunk(b"data: {{{\n\n")
            delta = {"choices": [{"index": 0, "delta": {"content": "w "}}]}
            self.chunk(b"data: " + json.dumps(delta).encode() + b"\n\n")
        if kind != "silent":
            prompt = sum(len(message["content"].split()) + 3 for message in body["messages"])
            usage = {
                "prompt_tokens": prompt,
                "completion_tokens": body["max_tokens"],
                "prompt_tokens_details": {"cached_tokens": prompt // 2},
            }
            self.chunk(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")
        if kind == "drops":
            # The next request is read, so that it was surely sent before the connection is gone.
            self.rfile.readline()
            self.close_connection = True

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def whole(self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    socketserver.ThreadingTCPServer.allow_reuse_address = True
    socketserver.ThreadingTCPServer.daemon_threads = True
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()


if __name__ == "__main__":
    sys.exit(main())
