"""Reading saved arrays into their places: how much of them is where, and when."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_tools import bytes_of_new_arrays
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco.checkpoint import arrays as arrays_lib
from maxdiloco.checkpoint import orbax_io
from maxdiloco.checkpoint.arrays import Cycled, read_item, split_over_slices
from maxdiloco.checkpoint.checkpointer import Checkpointer
from maxdiloco.errors import CheckpointError

LEAVES = 8
SHAPE = (8, 4)  # 128 bytes of float32
VALUES = {f"leaf{i}": np.arange(32, dtype=np.float32).reshape(SHAPE) + i for i in range(LEAVES)}


def saved(folder, values, sharding=None):
    """A checkpoint with some values as its item `params`."""
    with Checkpointer(folder, max_to_keep=1, use_async=False) as checkpointer:
        checkpointer.save(7, {"params": jax.device_put(values, sharding)}, {})
        return folder / "7"


@pytest.fixture
def step_folder(tmp_path):
    return saved(tmp_path, VALUES)


def wanted(sharding=None, dtype=np.float32):
    struct = jax.ShapeDtypeStruct(SHAPE, dtype, sharding=sharding)
    return dict.fromkeys(VALUES, struct)


def test_gathered_leaves_are_read_one_at_a_time(mesh_of, step_folder, monkeypatch):
    """Four slices read a quarter each: beside what is done there is one leaf and its quarter.

    All quarters first, all gathers after it, would be 2 leaves more at the end.
    """
    before = jax.live_arrays()
    most = []
    gather = arrays_lib._gathered

    def gathered(array, leaf):
        whole = gather(array, leaf)
        most.append(sum(bytes_of_new_arrays(before).values()))
        return whole

    monkeypatch.setattr(arrays_lib, "_gathered", gathered)
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    found = read_item(step_folder, "params", wanted(NamedSharding(mesh_of(4), P())))
    jax.tree.map(np.testing.assert_array_equal, found, VALUES)
    leaf = 4 * 128  # on four devices
    assert most == [n * leaf + leaf / 4 for n in range(1, LEAVES + 1)]


@pytest.mark.parametrize(("room", "leaves"), [(256, 3), (1 << 30, LEAVES)])
def test_a_host_reads_a_bounded_number_of_bytes_ahead(step_folder, monkeypatch, room, leaves):
    """Two leaves of 128 bytes fit into 256; a third is begun before the first one is placed."""
    started, most = [], []
    start = arrays_lib._started

    def counted(*args):
        nbytes, finish = start(*args)
        started.append(finish)

        def counted_finish():
            most.append(len(started))
            started.remove(finish)
            return finish()

        return nbytes, counted_finish

    monkeypatch.setattr(arrays_lib, "READ_AHEAD_BYTES", room)
    monkeypatch.setattr(arrays_lib, "_started", counted)
    found = read_item(step_folder, "params", wanted())
    jax.tree.map(np.testing.assert_array_equal, found, VALUES)
    assert max(most) == leaves


def test_a_device_reads_only_what_it_keeps(mesh_of, step_folder, monkeypatch):
    """The first 3 entries of 8, each cut in two over 3 x 2 devices, and cast to bfloat16."""
    sharding = NamedSharding(mesh_of(3, 2), P("diloco", "fsdp"))
    bounds = []
    read = arrays_lib.read_part

    def noted(x, part):
        bounds.append(part)
        return read(x, part)

    monkeypatch.setattr(arrays_lib, "read_part", noted)
    leaf = Cycled(jax.ShapeDtypeStruct((3, 4), jnp.bfloat16, sharding=sharding), stored=8)
    found = read_item(step_folder, "params", dict.fromkeys(VALUES, leaf))
    parts = [((r, r + 1), (c, c + 2)) for r in range(3) for c in (0, 2)]
    assert sorted(bounds) == sorted(parts * LEAVES)
    first = jax.tree.map(lambda x: x[:3].astype(jnp.bfloat16), VALUES)
    jax.tree.map(np.testing.assert_array_equal, found, first)


@pytest.mark.parametrize("lost", ["d/*", "manifest.ocdbt"])
def test_an_array_that_cannot_be_read_is_named(step_folder, lost):
    """A file is removed after the seal was checked, or is too large to have a checksum."""
    for path in [*step_folder.glob(f"params/{lost}"), *step_folder.glob(f"params/*/{lost}")]:
        path.unlink()
    with pytest.raises(CheckpointError) as caught:
        read_item(step_folder, "params", wanted())
    line = str(caught.value)
    assert "leaf0 of params" in line and f"{step_folder} " in line and "\n" not in line


@pytest.mark.parametrize(
    ("shape", "spec", "padded", "expected"),
    [
        ((4, 6), P(None, "fsdp"), (4, 6), P(("diloco",), "fsdp")),
        ((3, 8), P(None, "fsdp"), (3, 8), P(None, ("fsdp", "diloco"))),
        ((3, 10), P(None, "fsdp"), (3, 12), P(None, ("fsdp", "diloco"))),
        ((5,), P(), (6,), P(("diloco",))),
    ],
)
def test_the_dimension_that_is_read_in_parts(mesh_of, shape, spec, padded, expected):
    """The first whose shards divide; else the longest, padded."""
    mesh = mesh_of(2, 2)
    found = split_over_slices(shape, NamedSharding(mesh, spec))
    assert found == (padded, NamedSharding(mesh, expected))


MB = 1 << 20


@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((32, MB // 4), ()),  # 32 MiB
        ((33, MB // 4), (0,)),  # 33 layers of 1 MiB each
        ((1025, MB // 8), ()),  # of half a MiB each
        ((1, 20, MB), (0, 1)),  # a replica of 80 MiB
        ((2, 8, 2 * MB // 4, 2), (0,)),  # of 32 MiB each, all of their layers
        ((2, 8, 128, 512, 1024), (0, 1, 2)),  # with 128 experts
        ((128256, 4096), ()),  # a table: a row has 16 KiB
        ((), ()),
    ],
)
def test_replicas_layers_and_experts_of_large_leaves_are_chunks(shape, dims):
    """Of float32. Until a chunk has 32 MiB or less, and no smaller than 1 MiB."""
    assert orbax_io.split_dims(shape, 4) == dims


def test_a_chunk_of_a_sharded_leaf_is_one_layer_of_a_shard(mesh_of, tmp_path, monkeypatch):
    """[2 replicas, 3 layers, 8, 4] of float32 on 2 x 2 devices: a part has 3 * 64 bytes.

    Beside it one of 2 layers: a part has 128 bytes, and is one chunk.
    """
    monkeypatch.setattr(orbax_io, "CHUNK_BYTES", 128)
    monkeypatch.setattr(orbax_io, "LEAST_CHUNK_BYTES", 64)
    mesh = mesh_of(2, 2)
    values = {
        "large": np.arange(192, dtype=np.float32).reshape(2, 3, 8, 4),
        "small": np.arange(128, dtype=np.float32).reshape(2, 2, 8, 4),
    }
    folder = saved(tmp_path, values, NamedSharding(mesh, P("diloco", None, "fsdp")))
    of_one, reader = (
        arrays_lib.Reader(folder, "params", tuple(values), entry=entry) for entry in (0, 1)
    )
    for name, sizes in ("large", [(1, 8, 4)] * 3), ("small", [(2, 4, 4)] * 2):
        boxes = reader.boxes(name, 1)
        assert [tuple(s.stop - s.start for s in box) for box in boxes] == sizes
    for layer in range(3):
        box = (slice(layer, layer + 1), slice(0, 8), slice(0, 4))
        np.testing.assert_array_equal(of_one.read("large", box)[0], values["large"][0, layer])
    struct = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, P()))
    targets = jax.tree.map(lambda x: struct(x.shape, x.dtype), values)
    found = read_item(folder, "params", targets)
    jax.tree.map(np.testing.assert_array_equal, found, values)
