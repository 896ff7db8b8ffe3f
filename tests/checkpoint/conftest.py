"""Meshes, and saves that take as long as a test wants."""

import asyncio
import math
import threading

import numpy as np
import pytest
from jax.sharding import Mesh


@pytest.fixture
def mesh_of(devices):
    """mesh_of(2, 3): of the first devices, with the axes diloco and fsdp."""

    def make(*sizes):
        names = {1: ("diloco",), 2: ("diloco", "fsdp"), 3: ("diloco", "data", "fsdp")}
        return Mesh(np.array(devices[: math.prod(sizes)]).reshape(sizes), names[len(sizes)])

    return make


@pytest.fixture
def held_write(monkeypatch):
    """An event that Orbax's thread waits for before it writes the first byte of any array."""
    from orbax.checkpoint._src.serialization import serialization

    released = threading.Event()
    write = serialization.async_serialize_from_host

    async def wait_and_write(*args, **kwargs):
        await asyncio.to_thread(released.wait, 60)
        await write(*args, **kwargs)

    monkeypatch.setattr(serialization, "async_serialize_from_host", wait_and_write)
    return released
