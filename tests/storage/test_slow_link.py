"""A link that takes longer for a body than a request may be silent."""

import http.server
import threading
import time

import pytest

from maxdiloco.storage import store

CHUNK, BYTES_S = 1 << 13, 150_000


class Slow(http.server.BaseHTTPRequestHandler):
    """A store of one object of zeros, over a slow link, in both directions."""

    protocol_version = "HTTP/1.1"
    size = 150_000

    def log_message(self, *_):
        pass

    def do_PUT(self):
        left = int(self.headers["Content-Length"])
        while left:
            left -= len(self.rfile.read(min(left, CHUNK)))
            time.sleep(CHUNK / BYTES_S)
        self._answer(200, 0)

    def do_GET(self):
        self._answer(206, self.size, [("Content-Range", f"bytes 0-{self.size - 1}/{self.size}")])
        for start in range(0, self.size, CHUNK):
            self.wfile.write(bytes(min(CHUNK, self.size - start)))
            time.sleep(CHUNK / BYTES_S)

    def _answer(self, code, size, more=()):
        self.send_response(code)
        headers = [("ETag", '"1"'), ("Last-Modified", "Thu, 26 Nov 2026 10:00:00 GMT")]
        for name, value in [("Content-Length", str(size)), *headers, *more]:
            self.send_header(name, value)
        self.end_headers()


@pytest.fixture
def bucket(monkeypatch):
    monkeypatch.setattr(store, "TIMEOUT_S", 0.4)
    monkeypatch.setattr(store, "RETRY_S", 0.2)
    monkeypatch.setattr(store, "BLOCK_BYTES", 1 << 16)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
            monkeypatch.setenv(name, "any")
        yield store.connect("s3", "bucket", "run")
        server.shutdown()
        thread.join()


def test_an_object_that_takes_a_second_is_put_if_absent(bucket):
    """By one request, whose answer comes when all of it is there; 0.4 s of silence are the most."""
    assert bucket.put_if("s/0/0", bytes(Slow.size), None) is not None


def test_an_object_that_takes_a_second_is_read(bucket):
    data, entry = bucket.get_first("s/0/0", Slow.size)
    assert len(data) == entry.size == Slow.size
