"""Transfers over the host bring the bits of the collectives; the routes between processes."""

import contextlib
import itertools
import queue
import tracemalloc
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models.tiny_model import mesh_of

from maxdiloco.cluster import payloads
from maxdiloco.engine import collective, payload, reduce_scatter
from maxdiloco.engine.host_transfer import (
    HostTransfers,
    Routes,
    Shard,
    Transfer,
    process_of_shards,
    routes,
)


def chunks_of(mesh, M, dtype, lengths):
    numbers = np.random.default_rng(0)
    places = mesh.size // mesh.shape["diloco"]
    where = NamedSharding(mesh, collective.outgoing_spec(mesh))
    return tuple(
        jax.device_put(jnp.asarray(numbers.integers(-9, 9, M * places * n), dtype), where)
        for n in lengths
    )


def transfer(size, rows, *, scatters=False):
    return Transfer(("k",), size, rows, scatters, what="")


@pytest.mark.parametrize(
    ("dtype", "scatters"),
    [
        *((dtype, False) for dtype in (jnp.float32, jnp.bfloat16, jnp.int8, jnp.uint8)),
        *((dtype, True) for dtype in (jnp.uint16, jnp.uint8)),
    ],
)
@pytest.mark.parametrize(
    ("sizes", "M"), [({}, 1), (dict(diloco=2, fsdp=2), 2), (dict(diloco=2, data=2, fsdp=2), 4)]
)
def test_it_brings_the_arrays_of_the_program(devices, sizes, M, dtype, scatters):
    mesh = mesh_of(devices, **sizes)
    carrier, slots = HostTransfers(mesh, messenger=None), mesh.shape["diloco"]
    move = collective.all_to_all_chunk if scatters else collective.all_gather_chunk
    sent = chunks_of(mesh, M * slots if scatters else M, dtype, [1024, 1024])
    arriving = carrier.start(transfer(2000, M // slots, scatters=scatters), sent)
    for chunk, arrived in zip(sent, arriving.result(), strict=True):
        expected = move(chunk, mesh)
        assert arrived.sharding.is_equivalent_to(expected.sharding, 1)
        assert arrived.dtype == expected.dtype
        for a, b in zip(arrived.addressable_shards, expected.addressable_shards, strict=True):
            assert np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()
    carrier.close()


@pytest.mark.parametrize(
    ("scatters", "of_2"),
    [
        (False, Routes({1: (Shard(2, 0),)}, {1: (Shard(0, 0), Shard(1, 0))}, (Shard(2, 0),))),
        # Each sends a slice the part that it averages, of its own device, and nothing else.
        (True, Routes({1: (Shard(2, 0, to=0), Shard(2, 0, to=1))},
                      {1: (Shard(0, 0, to=2), Shard(1, 0, to=2))}, (Shard(2, 0, to=2),))),
    ],
    ids=["all_gather", "reduce_scatter"],
)  # fmt: skip
def test_what_one_sends_another_gets_in_the_same_order(scatters, of_2):
    """Three slices of two places; process 1 holds two slices, the others share the third."""
    holders = {Shard(s, p): 1 if s < 2 else 2 + p for s in range(3) for p in range(2)}
    tables = {process: routes(holders, process, scatters=scatters) for process in (1, 2, 3)}
    for a, b in itertools.permutations(tables, 2):
        assert tables[a].sends.get(b) == tables[b].gets.get(a)
    assert tables[2] == of_2


SIZE = (1500).to_bytes(8, "big")


class Loop:
    """The messenger of one process; its twin, with the other slot, sends back what it gets."""

    timeout_s = 60.0

    def __init__(self):
        self.messages = queue.Queue()

    def put(self, peer, key, data):
        self.messages.put((peer, key, b"".join(data)))

    def get(self, peer, key, deadline):
        sent_to, sent_key, data = self.messages.get(timeout=60)
        assert (sent_to, sent_key) == (peer, key)
        return memoryview(data)


@contextlib.contextmanager
def of_slot_0(mesh, messenger):
    """The transport of the process with the first slot, where each slot has a process."""
    carrier = HostTransfers(mesh, messenger=messenger)
    holders = {shard: shard.slice_index for shard in process_of_shards(mesh)}
    carrier._routes = [routes(holders, 0, scatters=scatters) for scatters in (False, True)]
    yield carrier
    carrier.close()


def test_padding_stays_here(devices):
    """Of 2 x 1024 elements 1,500 are a payload: those travel, and zeros stand for the rest."""
    mesh, messenger = mesh_of(devices, diloco=2), Loop()
    sent = chunks_of(mesh, 2, jnp.int8, [1024, 1024])
    with of_slot_0(mesh, messenger) as carrier:
        own = np.concatenate([np.asarray(chunk)[:1024] for chunk in sent])
        here = [SimpleNamespace(addressable_shards=x.addressable_shards[:1]) for x in sent]
        fetched = carrier._fetch(transfer(1500, 1), here)
        assert [data for _, _, data in messenger.messages.queue] == [SIZE, own[:1500].tobytes()]
        done = SimpleNamespace(result=lambda: fetched)
        arrived = carrier._collect(transfer(1500, 1), done)
    twin = np.concatenate([np.asarray(chunk)[1024:] for chunk in arrived])
    np.testing.assert_array_equal(twin[:1500], own[:1500])
    assert not twin[1500:].any()


class Silent(Loop):
    """Every payload of a peer is zeros, `size` bytes."""

    size = 0

    def get(self, peer, key, deadline):
        if key[-1] == "size":
            return self.size.to_bytes(8, "big")
        return bytearray(min(payloads.MESSAGE_BYTES, self.size - key[-1] * payloads.MESSAGE_BYTES))


def bytes_held(devices, M, exchange, monkeypatch):
    """The most that one of M processes holds at once, of numpy and of messages, while it takes what
    has come of a fragment of 2^19 values in int8."""
    mesh, messenger = mesh_of(devices, diloco=M), Silent()
    sent = payload.for_leaves([(1 << 19,)], [P()], wire="int8", mesh=mesh, num_replicas=M)
    transfers = [transfer(sent.size, 1)]
    if exchange == "reduce_scatter":
        sent = reduce_scatter.cut_payload(sent)
        transfers = [transfer(sent.sent_size, 1, scatters=True), transfer(sent.size, 1)]
    held = 0
    # As with large fragments: only one message of a payload is in memory twice.
    monkeypatch.setattr(payloads, "MESSAGE_BYTES", 1 << 12)
    with of_slot_0(mesh, messenger) as carrier:
        monkeypatch.setattr(carrier, "_to_devices", lambda codes, scatters: None)
        for each in transfers:
            own = {Shard(0, 0): [np.ones((1, each.size), np.uint8)]}
            messenger.size = each.size
            tracemalloc.start()
            carrier._collect(each, SimpleNamespace(result=lambda own=own: own))
            held += tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    return held


def test_memory_of_arrivals_grows_with_replicas_in_an_all_gather_only(devices, monkeypatch):
    """Reduce-scatter: a part of each replica, then a part of the mean of each, and two messages
    of a part. Control: an all-gather has all replicas, and two messages of one."""
    held = {
        exchange: [bytes_held(devices, M, exchange, monkeypatch) / 2**19 for M in (2, 4, 8)]
        for exchange in ("reduce_scatter", "all_gather")
    }
    np.testing.assert_allclose(
        held["reduce_scatter"], [2 + 2 * 1 / 2, 2 + 4 / 4, 2 + 4 / 8], rtol=0.06
    )
    np.testing.assert_allclose(held["all_gather"], [2 + 1, 4 + 2, 8 + 2], rtol=0.06)
