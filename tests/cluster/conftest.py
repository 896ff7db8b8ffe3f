"""What tests of several processes share."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys

import messenger_tools
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
def started():
    """Starts programs as lines of Python, with buffered streams, as people have them; what is left
    is killed at the end."""
    root = pathlib.Path(__file__).parents[2]
    with contextlib.ExitStack() as left:

        def start(program, *arguments, **environ):
            command, pipe = [sys.executable, "-c", program, *arguments], subprocess.PIPE
            options = dict(
                cwd=root, env=os.environ | {"PYTHONUNBUFFERED": ""} | environ, stdin=pipe
            )
            child = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **options)
            left.enter_context(child)
            left.callback(child.kill)
            return child

        yield start


@pytest.fixture
def network():
    """Makes messengers of threads of this process, closed at the end."""
    with messenger_tools.Network() as made:
        yield made
