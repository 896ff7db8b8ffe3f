"""What tests of several processes share."""

import contextlib
import socket

import pytest


@pytest.fixture
def free_port():
    """A free port with a free one after it."""
    while True:
        with contextlib.suppress(OSError), socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_server(("", port + 1)):
                return port
