"""What tests of several processes share."""

import contextlib
import socket
import threading
from types import SimpleNamespace

import jax
import link_tools
import pytest

from maxdiloco.processes import coordination


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
    """Makes links between threads of this process, closed at the end."""
    with link_tools.Network() as made:
        yield made


class Store:
    """The key-value store of JAX's coordination service, for threads. written: all that was put."""

    def __init__(self):
        self.written, self._changed = {}, threading.Condition()
        self._barrier = threading.Barrier(2)

    def key_value_set(self, key, value):
        with self._changed:
            assert key not in self.written and value
            self.written[key] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, key, timeout_in_ms):
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.written, timeout_in_ms / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
            return self.written[key]

    def wait_at_barrier(self, name, timeout_in_ms):
        self._barrier.wait(link_tools.WAIT_S)


@pytest.fixture
def store(monkeypatch, free_port):
    """The store, in the place of JAX's; its process 0 has the address `127.0.0.1`."""
    made = Store()
    state = SimpleNamespace(client=made, coordinator_address=f"127.0.0.1:{free_port}")
    monkeypatch.setattr(coordination.distributed, "global_state", state)
    return made
