"""A Google Cloud Storage of our own, for tests: the parts of its two APIs that a run uses.

The JSON API for TensorStore: list (prefix, offsets, pages), get, ranges, uploads of media, delete.
The XML API for obstore: list (prefix, delimiter, pages), get, ranges, head, put, uploads in parts,
copy, delete. Both with the generations and preconditions of the real ones. Objects live in memory.
Requests can be counted, held back, slowed down and refused.

In a test: `with FakeGcs() as store:`, with store.environ() in the program's environment. By hand:
    python tests/fake_gcs.py --port 9000 --latency 0.05 --unavailable 0.02
"""

import argparse
import itertools
import random
import re
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from fake_gcs_answers import (
    BUCKET,
    Request,
    Stored,
    described,
    error,
    headers_of,
    json_of,
    listed,
    md5,
    xml_of,
)

LOST = -1  # a fault: the request is carried out, and its answer never arrives


# Called before a request is carried out. It may sleep or wait; an HTTP status refuses the request.
Fault = Callable[[Request], int | None]


class FakeGcs:
    """The store, with one bucket. page: entries in one answer to a list, at most."""

    def __init__(self, *, port: int = 0, page: int = 1000):
        self.objects: dict[str, dict[str, Stored]] = {BUCKET: {}}
        self.page = page
        self.fault: Fault | None = None
        self.requests: list[tuple[Request, int]] = []  # with the status of the answer
        self.lock = threading.RLock()
        self.uploads: dict[str, dict[int, bytes]] = {}  # their parts
        self._generations = itertools.count(1_700_000_000_000_001)
        self._http = _Server(("127.0.0.1", port), _Handler)
        self._http.store = self
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)

    def __enter__(self) -> "FakeGcs":
        self._thread.start()
        return self

    def __exit__(self, kind, exception, traceback) -> None:
        self._http.shutdown()
        self._http.server_close()

    def environ(self) -> dict[str, str]:
        """The variables that lead the clients here."""
        return {
            "GOOGLE_BASE_URL": self.url,  # obstore
            "GOOGLE_BEARER_TOKEN": "any",
            "TENSORSTORE_GCS_HTTP_URL": self.url,
        }

    def names(self, prefix: str = "") -> list[str]:
        """The objects whose name begins with prefix."""
        with self.lock:
            return sorted(name for name in self.objects[BUCKET] if name.startswith(prefix))

    def put(self, name: str, data: bytes) -> Stored:
        """Write an object, as a client would."""
        with self.lock:
            stored = Stored(data, next(self._generations), time.time())
            self.objects[BUCKET][name] = stored
            return stored


class _Refused(Exception):
    def __init__(self, status: int, words: str = ""):
        self.status, self.words = status, words or f"fake {status}"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request, client_address) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client was killed
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    disable_nagle_algorithm = True  # an answer is two writes: 40 ms each otherwise

    def _handle(self) -> None:
        store: FakeGcs = self.server.store
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:  # the client has died
            self.close_connection = True
            return
        request = _parsed(self.command, self.path, self.headers)
        fault = store.fault(request) if store.fault else None
        headers, content = {}, b""
        try:
            if fault not in (None, LOST):
                raise _Refused(fault)
            if request.bucket != BUCKET:
                raise _Refused(404, "The specified bucket does not exist.")
            status, headers, content = getattr(self, f"_{request.kind}")(store, request, body)
        except _Refused as refused:
            status = refused.status
            content = error(request, status, refused.words)
        store.requests.append((request, status))
        if fault == LOST:
            self.close_connection = True
            return
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else content)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _handle

    def log_message(self, *args) -> None:
        """Print nothing: store.requests has all."""

    def _list(self, store, request, body):
        query, objects = request.query, store.objects[BUCKET]
        tokens = ("startOffset", "pageToken", "continuation-token")
        first = max(query.get(name, "") for name in tokens)
        limit = min(int(query.get("maxResults", store.page)), store.page)
        items, prefixes, rest = [], [], None
        with store.lock:
            for name in sorted(objects):
                if not name.startswith(request.name) or name < first:
                    continue
                if name >= query.get("endOffset", "\U0010ffff"):
                    break
                head, found, _ = name[len(request.name) :].partition(query.get("delimiter") or "\0")
                folder = request.name + head + query.get("delimiter", "")
                if found and prefixes[-1:] == [folder]:
                    continue
                if len(items) + len(prefixes) == limit:
                    rest = name
                    break
                (prefixes if found else items).append(
                    folder if found else described(name, objects[name])
                )
        if request.is_xml:
            return listed(items, prefixes, rest)
        page = {"kind": "storage#objects", "items": items, "prefixes": prefixes}
        return json_of(page | ({"nextPageToken": rest} if rest else {}))

    def _stat(self, store, request, body):
        stored = _found(store, request)
        if request.is_xml:
            return 200, headers_of(stored), stored.data
        return json_of(described(request.name, stored))

    def _read(self, store, request, body):
        stored = _found(store, request)
        headers = headers_of(stored)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not wanted:
            return 200, headers, stored.data
        start, end = int(wanted[1]), min(int(wanted[2]), len(stored.data) - 1)
        if start > end:
            raise _Refused(416)
        headers["Content-Range"] = f"bytes {start}-{end}/{len(stored.data)}"
        return 206, headers, stored.data[start : end + 1]

    def _write(self, store, request, body):
        stored = _stored(store, request, body)
        return (
            (200, headers_of(stored), b"")
            if request.is_xml
            else json_of(described(request.name, stored))
        )

    def _part(self, store, request, body):
        """Begin an upload in parts, add a part, or put them together."""
        with store.lock:
            if "uploads" in request.query:
                key = f"upload-{next(store._generations)}"
                store.uploads[key] = {}
                return 200, {}, xml_of("InitiateMultipartUploadResult", UploadId=key)
            parts = store.uploads[request.query["uploadId"]]
            if "partNumber" in request.query:
                parts[int(request.query["partNumber"])] = body
                return 200, {"ETag": f'"{md5(body)}"'}, b""
            stored = _stored(store, request, b"".join(parts[n] for n in sorted(parts)))
        tag = f'"{md5(stored.data)}"'
        return 200, headers_of(stored), xml_of("CompleteMultipartUploadResult", ETag=tag)

    def _delete(self, store, request, body):
        with store.lock:
            _found(store, request)
            del store.objects[BUCKET][request.name]
        return 204, {}, b""

    def _copy(self, store, request, body):
        source = urllib.parse.unquote(self.headers["x-goog-copy-source"]).partition("/")[2]
        with store.lock:
            found = _found(store, request._replace(name=source))
            return 200, headers_of(_stored(store, request, found.data)), xml_of("CopyObjectResult")


def _parsed(method: str, path: str, headers) -> Request:
    url = urllib.parse.urlsplit(path)
    query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
    if not re.match(r"(/upload|/download)?/storage/v1/b/", url.path):
        return _parsed_xml(method, url.path, query, headers)
    service = r"(/upload|/download)?/storage/v1/b/([^/]+)/o(?:/([^/]+))?"
    found = re.fullmatch(service, url.path)
    assert found, f"{method} {path} is no request that the fake store knows"
    service, bucket, name = found.groups()
    name = urllib.parse.unquote(name or "")
    if method == "DELETE":
        kind = "delete"
    elif service == "/upload":
        kind, name = "write", query.get("name", "")
    elif not name:
        kind, name = "list", query.get("prefix", "")
    else:
        kind = "read" if service or query.get("alt") == "media" else "stat"
    return Request(method, kind, urllib.parse.unquote(bucket), name, query)


def _parsed_xml(method: str, path: str, query: dict[str, str], headers) -> Request:
    bucket, _, name = path[1:].partition("/")
    name = urllib.parse.unquote(name)
    kinds = {"GET": "read", "HEAD": "stat", "PUT": "write", "DELETE": "delete"}
    if {"uploads", "uploadId"} & query.keys():
        kind = "part"
    elif "x-goog-copy-source" in headers:
        kind = "copy"
    else:
        kind = kinds[method]
    if not name:
        kind, name = "list", query.get("prefix", "")
    if (expected := headers["x-goog-if-generation-match"]) is not None:
        query["ifGenerationMatch"] = expected
    return Request(method, kind, urllib.parse.unquote(bucket), name, query, is_xml=True)


def _check(request: Request, stored: Stored | None) -> None:
    """The preconditions; generation 0 is that of an object that does not exist."""
    generation = str(stored.generation if stored else 0)
    if request.query.get("ifGenerationMatch", generation) != generation:
        raise _Refused(412)
    if request.query.get("ifGenerationNotMatch") == generation:
        raise _Refused(304 if request.method == "GET" else 412)


def _found(store: FakeGcs, request: Request) -> Stored:
    stored = store.objects[BUCKET].get(request.name)
    _check(request, stored)
    if stored is None:
        raise _Refused(404)
    return stored


def _stored(store: FakeGcs, request: Request, data: bytes) -> Stored:
    with store.lock:
        _check(request, store.objects[BUCKET].get(request.name))
        return store.put(request.name, data)


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description="A fake Google Cloud Storage on this machine.")
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--latency", type=float, default=0.0, help="of each request [seconds]")
    parser.add_argument("--unavailable", type=float, default=0.0, help="share answered with 503")
    options = parser.parse_args()

    def slow(request: Request) -> int | None:
        time.sleep(options.latency)
        return 503 if random.random() < options.unavailable else None

    with FakeGcs(port=options.port) as store:
        store.fault = slow
        print(*(f"export {key}={value}" for key, value in store.environ().items()), sep="\n")
        threading.Event().wait()


if __name__ == "__main__":
    main()
