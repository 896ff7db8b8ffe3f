"""Files behind HTTP for tests, as behind https: HEAD, GET, ranges and ETags, and no listing.

    with HttpsServer({"a.txt": b"text"}) as server:  # with server.environ() in the environment
"""

import hashlib
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class HttpsServer:
    """The server. files: by name; status: of a name, in place of its own."""

    def __init__(self, files: dict[str, bytes]):
        self.files, self.status = files, {}
        self.ranges = True  # whether it knows them
        self.requests: list[tuple[str, str]] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._http.daemon_threads = True
        self._http.files = self
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)

    def __enter__(self) -> "HttpsServer":
        self._thread.start()
        return self

    def __exit__(self, kind, exception, traceback) -> None:
        self._http.shutdown()
        self._http.server_close()

    def environ(self) -> dict[str, str]:
        """The variable that leads the client here."""
        return {"HTTPS_BASE_URL": f"http://127.0.0.1:{self._http.server_port}"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """A file, or a range of one; of HEAD its headers alone."""
        server: HttpsServer = self.server.files
        name = urllib.parse.unquote(self.path.partition("?")[0]).strip("/")
        server.requests.append((self.command, name))
        data = server.files.get(name)
        status = server.status.get(name, 404 if data is None else 200)
        headers, body = {}, b""
        if status == 200:
            headers["ETag"], body = f'"{hashlib.md5(data).hexdigest()}"', data
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if wanted and server.ranges:
                start, end = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
                status, body = 206, data[start:end]
                headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *args) -> None:
        """Print nothing."""
