"""Which rows a process reads, and the arrays that are made of them."""

import collections
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.data import order, pipeline
from maxdiloco.data.synthetic import SyntheticWindows
from maxdiloco.parallel import global_batch


def test_hosts_of_a_torus_read_their_rows_and_feed_their_devices():
    """Two 4x4 slices in tiles of 2x2, 3 rows a device: each of the 96 rows is read by one host.
    Replica m is slice m; device i of a slice, row by row, holds three rows of it."""
    M, B, side = 2, 48, 4
    hosts = collections.defaultdict(list)  # {host: shards [R, B, L] of its devices}
    for m, y, x in itertools.product(range(M), range(side), range(side)):
        first = (y * side + x) * 3
        shard = (slice(m, m + 1), slice(first, first + 3), slice(None))
        hosts[m, y // 2, x // 2].append(shard)
    data = pipeline.Dataset(SyntheticWindows(0, "train", 99, 5), None, "dataset_type=synthetic")
    position = order.first_position(M, B)
    indices = np.ix_(range(M), range(B))
    whole = data.read(position, 1, replicas=indices[0], rows=indices[1])["tokens"]
    count = 0
    for shards in hosts.values():
        rows = global_batch.rows_of(shards, whole.shape)
        # The tile's second row of devices is 12 rows further on: a box around the rows has 18.
        assert np.prod([np.ptp(coordinates) + 1 for coordinates in rows]) == 18
        count += len(rows[0])
        local = data.read(position, 1, replicas=rows[0], rows=rows[1])["tokens"]
        take_shard = global_batch.shard_reader(rows, whole.shape)
        for shard in shards:
            assert np.array_equal(take_shard(local, shard), whole[shard])
    assert count == M * B


def test_a_row_of_another_process_is_no_row_of_this_one():
    """Asking for it is an error, not some other row. Rows that several devices hold are read
    once."""
    shards = [(slice(2, 4), slice(None)), (slice(2, 4), slice(None)), (slice(0, 1), slice(None))]
    (rows,) = global_batch.rows_of(shards, (6, 8))
    assert rows.tolist() == [0, 2, 3]
    take_shard = global_batch.shard_reader((rows,), (6, 8))
    local = np.arange(24).reshape(3, 8)
    shard = take_shard(local, (slice(3, 4), slice(0, 4)))
    assert np.array_equal(shard, local[2:, :4])
    with pytest.raises(IndexError):
        take_shard(local, (slice(3, 5), slice(None)))


@pytest.mark.parametrize(
    "spec",
    [P("diloco", "fsdp"), P(None, ("diloco", "fsdp")), P("diloco", None, "fsdp"), P("diloco"), P()],
)
def test_arrays_of_the_whole_shape_hold_every_row_in_its_place(spec):
    """Where one process has all devices it reads all rows; also with L split over devices."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("diloco", "fsdp"))
    whole = np.arange(2 * 4 * 6, dtype=np.int32).reshape(2, 4, 6)
    sharding = NamedSharding(mesh, spec)
    rows = global_batch.local_rows(sharding, whole.shape)
    (batch,) = global_batch.assemble(iter([{"tokens": whole[rows]}]), rows, sharding, whole.shape)
    assert batch["tokens"].sharding == sharding
    assert np.array_equal(batch["tokens"], whole)
