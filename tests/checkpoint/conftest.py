"""Saves that take as long as a test wants."""

import asyncio
import threading

import pytest


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
