"""The page on 127.0.0.1, made anew at each request."""

import contextlib
import http.server
from collections.abc import Callable

from maxdiloco.errors import USER_ERRORS, ConfigError

HOST = "127.0.0.1"


def server(make: Callable[[], str], *, port: int) -> http.server.ThreadingHTTPServer:
    """A server of the page that make() returns; for this machine alone, until it is closed.

    port: 0 takes a free one. A run that cannot be read is a line in place of the page, and the next
    request tries again. A page of another name may not read it: its requests name another host.
    Raises ConfigError for a port that is taken.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        """Answers GET / with the page, in threads: browsers open connections that say nothing."""

        timeout = 30  # s, of such a connection

        def do_GET(self) -> None:
            """Send the page, or a line that says why there is none."""
            asked = self.headers.get("Host", "").rpartition(":")[0]
            if self.path != "/" or asked not in (HOST, "localhost"):
                self.send_error(404)
                return
            status, text = 200, ""
            try:
                text = make()
            except USER_ERRORS as error:
                status, text = 503, f"{type(error).__name__}: {error}\n"
            content = text.encode()
            self.send_response(status)
            kind = "html" if status == 200 else "plain"
            self.send_header("Content-Type", f"text/{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            with contextlib.suppress(ConnectionError):  # the browser went away
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            """Requests are no news."""

    try:
        return http.server.ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise ConfigError(
            f"port={port} cannot be listened on: {error.strerror}. Use port=0, any that is free."
        ) from error
