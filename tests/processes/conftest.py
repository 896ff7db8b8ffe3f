"""What tests of several processes share."""

import contextlib
import socket

import mailbox_tools
import pytest


@pytest.fixture
def free_port():
    """A free port with a free one after it."""
    while True:
        with contextlib.suppress(OSError), socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_server(("", port + 1)):
                return port


@pytest.fixture
def network():
    """Makes mailboxes of threads of this process, closed at the end."""
    with mailbox_tools.Network() as made:
        yield made
