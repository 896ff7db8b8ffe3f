"""Files on https:// for tests: HEAD, GET, ranges and ETags, and no listing.

with HttpsServer({"a.txt": b"text"}, tmp_path) as server:  # server.environ in the environment
"""

import datetime
import hashlib
import ipaddress
import re
import ssl
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class HttpsServer:
    """The server, at `url`. files: by name; status: of a name, instead of its own; environ: makes
    clients trust it, by a certificate in `home`."""

    def __init__(self, files: dict[str, bytes], home):
        self.files, self.status = files, {}
        self.ranges = True  # whether it knows them
        self.requests: list[tuple[str, str]] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._http.daemon_threads = True
        self._http.handle_error = lambda request, address: None  # one that does not trust it
        self._http.files = self
        certificate = home / "server.pem"
        certificate.write_bytes(_certificate())
        self._http.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._http.context.load_cert_chain(certificate)
        self.environ = {"SSL_CERT_FILE": str(certificate)}
        self.url = f"https://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)

    def __enter__(self) -> "HttpsServer":
        self._thread.start()
        return self

    def __exit__(self, kind, exception, traceback) -> None:
        self._http.shutdown()
        self._http.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    disable_nagle_algorithm = True

    def setup(self) -> None:
        """The handshake, in the thread of the connection."""
        self.request = self.server.context.wrap_socket(self.request, server_side=True)
        super().setup()

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


def _certificate() -> bytes:
    """A key and its own certificate for 127.0.0.1, PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, pkcs8, plain) + made.public_bytes(
        serialization.Encoding.PEM
    )
