"""A Google Cloud Storage of our own, for tests: the part of its JSON API that a run uses.

Serves list (prefix, delimiter, offsets, pages), get, ranges, media, multipart and resumable
uploads, delete, rewrite and move, with the generations and preconditions of the real one, to
gcsfs, TensorStore and google-cloud-storage. Objects live in memory. Requests can be counted, held
back, slowed down and refused.

In a test: `with FakeGcs() as store:`, with store.environ() in the program's environment. By hand:
    python tests/fake_gcs.py --port 9000 --latency 0.05 --unavailable 0.02
"""

import argparse
import base64
import datetime
import email.parser
import hashlib
import itertools
import json
import random
import re
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import google_crc32c

BUCKET = "fake-bucket"
LOST = -1  # a fault: the request is carried out, and its answer never arrives


class Request(NamedTuple):
    """What a client has asked. kind: list, read, stat, write, delete, move or bucket."""

    method: str
    kind: str
    bucket: str
    name: str  # of the object; of a list, the prefix
    query: dict[str, str]


class Stored(NamedTuple):
    """One generation of an object. updated: seconds since 1970."""

    data: bytes
    generation: int
    updated: float


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
        self.uploads: dict[str, tuple[Request, bytearray]] = {}
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
            "STORAGE_EMULATOR_HOST": self.url,  # gcsfs, google-cloud-storage
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # else it asks for the layout by gRPC
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

    def age(self, name: str, seconds: float) -> None:
        """Let an object look as if it had been written earlier."""
        with self.lock:
            stored = self.objects[BUCKET][name]
            self.objects[BUCKET][name] = stored._replace(updated=stored.updated - seconds)


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
        request = _parsed(self.command, self.path)
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
            content = json.dumps({"error": {"code": status, "message": refused.words}}).encode()
        store.requests.append((request, status))
        if fault == LOST:
            self.close_connection = True
            return
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_DELETE = _handle

    def log_message(self, *args) -> None:
        """Print nothing: store.requests has all."""

    def _bucket(self, store, request, body):
        return _json({"kind": "storage#bucket", "name": request.bucket})

    def _list(self, store, request, body):
        query, objects = request.query, store.objects[BUCKET]
        first = max(query.get("startOffset", ""), query.get("pageToken", ""))
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
                    folder if found else _described(name, objects[name])
                )
        page = {"kind": "storage#objects", "items": items, "prefixes": prefixes}
        return _json(page | ({"nextPageToken": rest} if rest else {}))

    def _stat(self, store, request, body):
        return _json(_described(request.name, _found(store, request)))

    def _read(self, store, request, body):
        stored = _found(store, request)
        headers = {"x-goog-generation": str(stored.generation)}
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not wanted:
            return 200, headers, stored.data
        size = len(stored.data)
        start = int(wanted[1]) if wanted[1] else max(0, size - int(wanted[2]))
        end = min(int(wanted[2]) if wanted[1] and wanted[2] else size, size - 1)
        if start >= size:
            raise _Refused(416)
        headers["Content-Range"] = f"bytes {start}-{end}/{size}"
        return 206, headers, stored.data[start : end + 1]

    def _write(self, store, request, body):
        way = request.query.get("uploadType", "media")
        if way == "resumable":
            return self._resumable(store, request, body)
        if way == "multipart":
            name, body = _parts(self.headers["Content-Type"], body)
            request = request._replace(name=name)
        return _json(_stored(store, request, body))

    def _resumable(self, store, request, body):
        key = request.query.get("upload_id")
        if key is None:
            key = f"upload-{next(store._generations)}"
            name = request.name or json.loads(body)["name"]
            store.uploads[key] = request._replace(name=name), bytearray()
            place = f"{store.url}/upload/storage/v1/b/{request.bucket}/o"
            return 200, {"Location": f"{place}?uploadType=resumable&upload_id={key}"}, b""
        begun, content = store.uploads[key]
        total = self.headers["Content-Range"].rpartition("/")[2]
        content += body
        if total != "*" and len(content) == int(total):
            return _json(_stored(store, begun, bytes(store.uploads.pop(key)[1])))
        return 308, {"Range": f"bytes=0-{len(content) - 1}"} if content else {}, b""

    def _delete(self, store, request, body):
        if "upload_id" in request.query:
            store.uploads.pop(request.query["upload_id"], None)
            return 499, {}, b""
        with store.lock:
            _found(store, request)
            del store.objects[BUCKET][request.name]
        return 204, {}, b""

    def _move(self, store, request, body):
        target = urllib.parse.unquote(re.search(r"/moveTo/o/([^/?]+)", self.path)[1])
        with store.lock:
            moved = store.put(target, _found(store, request).data)
            del store.objects[BUCKET][request.name]
        return _json(_described(target, moved))


def _parsed(method: str, path: str) -> Request:
    url = urllib.parse.urlsplit(path)
    query = dict(urllib.parse.parse_qsl(url.query))
    service = r"(/upload|/download)?/storage/v1/b/([^/]+)"
    found = re.fullmatch(service + r"(/o(?:/([^/]+)(/.+)?)?)?", url.path)
    if not found:
        raise ValueError(f"{method} {path} is no request that the fake store knows")
    service, bucket, objects, name, rest = found.groups()
    name = urllib.parse.unquote(name or "")
    if method == "DELETE":
        kind = "delete"
    elif service == "/upload":
        kind, name = "write", query.get("name", "")
    elif rest:
        kind = "move"
    elif not objects:
        kind = "bucket"
    elif not name:
        kind, name = "list", query.get("prefix", "")
    else:
        kind = "read" if service or query.get("alt") == "media" else "stat"
    return Request(method, kind, urllib.parse.unquote(bucket), name, query)


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


def _stored(store: FakeGcs, request: Request, data: bytes) -> dict:
    with store.lock:
        _check(request, store.objects[BUCKET].get(request.name))
        return _described(request.name, store.put(request.name, data))


def _parts(content_type: str, body: bytes) -> tuple[str, bytes]:
    """Name and content of a multipart upload: JSON, then the bytes."""
    message = email.parser.HeaderParser().parsestr(f"Content-Type: {content_type}\n\n")
    boundary = b"--" + message.get_boundary().encode()
    _, first, second, _ = body.split(boundary, 3)
    end = b"\r\n" if b"\r\n" in first else b"\n"
    description = json.loads(first.partition(end + end)[2])
    return description["name"], second.partition(end + end)[2].removesuffix(end)


def _described(name: str, stored: Stored) -> dict:
    when = datetime.datetime.fromtimestamp(stored.updated, datetime.UTC)
    stamp = when.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return {
        "bucket": BUCKET,
        "name": name,
        "generation": str(stored.generation),
        "metageneration": "1",
        "size": str(len(stored.data)),
        "md5Hash": base64.b64encode(hashlib.md5(stored.data).digest()).decode(),
        "crc32c": base64.b64encode(google_crc32c.value(stored.data).to_bytes(4, "big")).decode(),
        "updated": stamp,
    }


def _json(value: dict) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json; charset=UTF-8"}, json.dumps(value).encode()


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description="A fake Google Cloud Storage on this machine.")
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--latency", type=float, default=0.0, help="of each request [seconds]")
    parser.add_argument("--unavailable", type=float, default=0.0, help="share answered with 503")
    options = parser.parse_args()
    with FakeGcs(port=options.port) as store:

        def slow(request: Request) -> int | None:
            time.sleep(options.latency)
            return 503 if random.random() < options.unavailable else None

        store.fault = slow
        print(*(f"export {key}={value}" for key, value in store.environ().items()), sep="\n")
        threading.Event().wait()


if __name__ == "__main__":
    main()
