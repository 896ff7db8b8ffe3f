"""Files of a folder on https://, for tests: `with WebServer(folder) as server:`."""

import datetime
import functools
import http.server
import ipaddress
import ssl
import threading

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class WebServer:
    """The server, at 127.0.0.1. environ: makes clients trust it. status: answered in place of
    files, where it is set. requests: names that were asked for."""

    def __init__(self, folder, home):
        handler = functools.partial(_Handler, directory=str(folder))
        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.owner = self
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        certificate = home / "server.pem"
        certificate.write_bytes(_certificate())
        context.load_cert_chain(certificate)
        self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        self.url = f"https://127.0.0.1:{self._http.server_port}"
        self.environ = {"SSL_CERT_FILE": str(certificate)}
        self.status: int | None = None
        self.requests: list[str] = []
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)

    def __enter__(self) -> "WebServer":
        self._thread.start()
        return self

    def __exit__(self, kind, exception, traceback) -> None:
        self._http.shutdown()
        self._http.server_close()


class _Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """A file, or the status that is set."""
        server = self.server.owner
        server.requests.append(self.path)
        if server.status is None:
            super().do_GET()
        else:
            self.send_error(server.status)

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
