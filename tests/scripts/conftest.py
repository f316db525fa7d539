"""A small real OpenAI-compatible streaming server on the loopback interface."""

import http.server
import json
import threading

import pytest


class StreamingServer(http.server.ThreadingHTTPServer):
    """Answers `/v1/models`, streams `/v1/chat/completions`; `misbehave` picks what goes wrong in a request.

    `requests` records every body. `misbehave(number, body)` returns None for a good answer, or one of: "http 500",
    "refuse" (close before a byte), "drop" (close after two pieces), "not json", "not object", "server error",
    "no token", "half" (a chunked stream cut inside a chunk), "no usage", "hang".
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests = []
        self.seen = []  # heads of earlier requests: what a prefix cache would hold
        self.misbehave = lambda number, body: None
        self.lock = threading.Lock()
        self.release = threading.Event()
        self.models = ["tiny"]
        self.in_flight = self.most_in_flight = 0

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        body = json.dumps({"data": [{"id": name} for name in self.server.models]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.requests.append(body)
            number = len(server.requests)
            server.in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
        try:
            self._answer(body, server.misbehave(number, body))
        finally:
            with server.lock:
                server.in_flight -= 1

    def _answer(self, body, fault):
        self.close_connection = True
        if fault == "refuse":
            return
        if fault == "http 500":
            self.send_response(500)
            self.send_header("Content-Length", "4")
            self.end_headers()
            self.wfile.write(b"oops")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        if fault == "half":
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Connection", "close")
        self.end_headers()
        if fault == "half":
            self.wfile.write(b"40\r\ndata: {")
            return
        if fault == "hang":
            self.wfile.flush()
            self.server.release.wait(900)
            return
        prompt = sum(len(message["content"].split()) for message in body["messages"])
        messages = [message["content"] for message in body["messages"]]
        heads = [messages[:count] for count in range(1, len(messages) + 1)]
        cached = max((len(" ".join(head).split()) for head in heads if head in self.server.seen), default=0)
        self.server.seen += heads
        pieces = 0 if fault == "no token" else min(body["max_tokens"], 4)
        self._send({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for piece in range(pieces):
            self._send({"choices": [{"delta": {"content": f"w{piece} "}}]})
            if fault == "drop" and piece == 1:
                return
        if fault == "not json":
            self.wfile.write(b"data: {broken\n\n")
            return
        if fault == "not object":
            self._send([1])
            return
        if fault == "server error":
            self._send({"error": {"message": "out of slots"}})
            return
        if fault != "no usage":
            usage = {"prompt_tokens": prompt, "completion_tokens": pieces * 2}
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
            if fault == "no token":
                del usage["completion_tokens"]
            self._send({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, chunk):
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.flush()


@pytest.fixture
def server():
    """A running server; stopped after the test."""
    running = StreamingServer()
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield running
    running.release.set()
    running.shutdown()
    thread.join()
    running.server_close()
