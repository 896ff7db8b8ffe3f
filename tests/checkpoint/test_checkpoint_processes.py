"""Checkpoints of a run with two processes, one emulated slice each."""

import json
import os
import pathlib
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiloco.checkpoint.parameter_sets import restore_parameters
from maxdiloco.storage.run_folder import locate

ROOT = pathlib.Path(__file__).parents[2]

SCRIPT = """
import json, sys, time
import numpy as np
import jax
import jax.numpy as jnp
rank, port, base = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"localhost:{port}", 2, rank)
from jax.sharding import NamedSharding, PartitionSpec as P
from maxdiloco.checkpoint import read, seal
from maxdiloco.cluster import agree
from maxdiloco.checkpoint.checkpointer import Checkpointer
from maxdiloco.checkpoint.arrays import Cycled
from maxdiloco.errors import CheckpointError, SaveError
from maxdiloco.storage import shared_folder
from maxdiloco.storage.run_folder import locate
from etils import epath
from orbax.checkpoint._src.serialization import serialization
folder = locate(base, "run").checkpoints
mesh = jax.make_mesh((2, 2), ("diloco", "fsdp"), (jax.sharding.AxisType.Auto,) * 2)

def place(values, *spec, kind=None):
    sharding = NamedSharding(mesh, P(*spec), memory_kind=kind)
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

SPECS = {  # name: (shape, dtype, spec)
    "even": ((4, 6), np.float32, (None, "fsdp")),   # 4 rows: two a slice
    "odd": ((3, 5), np.float32, ()),                # nothing divides: padded
    "wide": ((3, 10), np.float32, (None, "fsdp")),  # 5 a shard: padded
    "bytes": ((6,), np.int8, ()),
    "scalar": ((), np.int32, ()),
    "own": ((2, 4), np.float32, ("diloco", "fsdp")),
}

def values(name):
    shape, dtype, _ = SPECS[name]
    found = np.arange(1, 1 + int(np.prod(shape))).reshape(shape).astype(dtype)
    return np.where(found == 2, np.array(-0.0 if dtype == np.float32 else 2, dtype), found)

four = np.arange(12, dtype=np.int32).reshape(4, 3)
items = {
    "outer_params": {name: place(values(name), *spec) for name, (_, _, spec) in SPECS.items()},
    "host": {"x": place(values("even"), None, "fsdp", kind="pinned_host")},
    "replicas": {"two": place(values("own"), "diloco", "fsdp"), "four": place(four, "diloco")},
}

def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)

def tell(what, value):
    with open(f"{base}-{rank}", "a") as file:
        print(json.dumps([what, value]), file=file)

def open_checkpoints():
    return Checkpointer(folder, max_to_keep=2, say=lambda line: tell("said", line))

def local_bits(array):
    return [np.asarray(shard.data).tobytes() for shard in array.addressable_shards]

with open_checkpoints() as checkpointer:
    for step in (1, 2, 3):
        checkpointer.save(step, items, {"t": step})
    restored = checkpointer.restore(lambda meta: abstract(items))
same = jax.tree.map(
    lambda a, b: (a.sharding, a.dtype, local_bits(a)) == (b.sharding, b.dtype, local_bits(b)),
    restored.items,
    items,
)
tell("restored", restored.step)
tell("same", all(jax.tree.leaves(same)))
tell("kind", restored.items["host"]["x"].sharding.memory_kind)

def cycled(M, stored, shape, dtype, *spec):
    sharding = NamedSharding(mesh, P("diloco", *spec))
    return Cycled(jax.ShapeDtypeStruct((M, *shape), dtype, sharding=sharding), stored)

wanted = {"two": cycled(6, 2, (4,), np.float32, "fsdp"), "four": cycled(2, 4, (3,), np.int32)}
with open_checkpoints() as checkpointer:
    found = checkpointer.restore(lambda meta: {"replicas": wanted}).items["replicas"]
expected = {"two": values("own")[np.arange(6) % 2], "four": four[:2]}
tell("cycled", [
    np.array_equal(shard.data, expected[name][shard.index])
    for name in expected
    for shard in found[name].addressable_shards
])
tell("there", sorted(path.name for path in folder.iterdir()))

with open_checkpoints() as checkpointer:
    if rank == 0:
        (folder / "3" / "meta" / "metadata").unlink()
    agree.in_any_process(False)  # a barrier
    restored = checkpointer.restore(lambda meta: abstract(items))
    tell("used", restored.step)
    tell("saved again", checkpointer.save(3, items, {"t": 3}))

write_slices = serialization.async_serialize_from_host

async def full_disk(*args, **kwargs):
    raise ValueError("RESOURCE_EXHAUSTED: Failed to write 5 bytes: No space left on device")

def failing(there):  # in the second process only
    serialization.async_serialize_from_host = full_disk if there and rank else write_slices

with open_checkpoints() as checkpointer:
    for step in (4, 5):
        failing(step == 4)
        checkpointer.save(step, items, {"t": step})
        checkpointer.wait()
    failing(True)
    try:
        for step in (6, 7):
            checkpointer.save(step, items, {"t": step})
            checkpointer.wait()
    except SaveError as error:
        tell("ended", str(error))
    failing(False)
    tell("good", checkpointer.restore(lambda meta: {}).step)
    agree.in_any_process(False)  # a barrier

# One host sees a file later than the other, or never.
read.shared_folder.WAIT_S = read.shared_folder.SHORT_WAIT_S = 1.2
damage = seal.damage
looks = []

def late(*arguments, **options):
    looks.append(options)
    if rank == 1 and len(looks) <= late_looks:
        return seal.Damage(0, "a file is missing")
    return damage(*arguments, **options)

seal.damage = late
for what, late_looks in (("late", 2), ("never", 1000)):
    looks.clear()
    try:
        with open_checkpoints() as checkpointer:
            tell(what, checkpointer.restore(lambda meta: {}).step)
    except CheckpointError as error:
        tell(what, str(error))

def refusal(what):
    try:
        open_checkpoints()
    except CheckpointError as error:
        tell(what, str(error))

folder = locate(base + ("" if rank == 0 else "-elsewhere"), "run").checkpoints
refusal("absent")
folder.mkdir(parents=True, exist_ok=True)
(folder / "maxdiloco-start").write_text("1")  # of a start before
refusal("another")
cache = epath.Path(base + "-caches")
(cache / "same").mkdir(parents=True, exist_ok=True)
(cache / "same" / "start").write_text("1")  # of another run that looks at this folder
began = time.monotonic()
asked = [cache / "same", cache / f"of-{rank}", None if rank else cache / "same",
         cache / "same" if rank else None, cache / "same" / "start" / "below a file"]
tell("shared", [shared_folder.is_shared(folder) for folder in asked])
tell("seconds", time.monotonic() - began)
"""


class Told(NamedTuple):
    """What a process has printed, and its answers."""

    said: list[str]
    answers: dict


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder of the checkpoints, and what each of the two processes told."""
    path = tmp_path_factory.mktemp("two")
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])

    def run(rank):
        command = [sys.executable, "-c", SCRIPT, str(rank), port, str(path / "base")]
        pipes = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # gloo writes to stdout
        done = subprocess.run(command, cwd=ROOT, text=True, timeout=180, **pipes)
        assert done.returncode == 0, done.stderr[-3000:]

    with ThreadPoolExecutor() as pool:
        list(pool.map(run, range(2)))
    lines = [(path / f"base-{rank}").read_text().splitlines() for rank in range(2)]
    told = [[json.loads(line) for line in mine] for mine in lines]
    first, second = (
        Told([text for what, text in mine if what == "said"], dict(mine)) for mine in told
    )
    return locate(path / "base", "run").checkpoints, first, second


def test_what_two_processes_save_comes_back_to_the_bit(two):
    """In both; as the replicas of another M, two become six and four become two, of which a process
    holds half on two devices; and in one process alone."""
    folder, *both = two
    for mine in both:
        assert mine.answers["restored"] == 3
        assert mine.answers["same"]
        assert mine.answers["kind"] == "pinned_host"
        assert mine.answers["there"] == ["2", "3"]  # two are kept
        assert mine.answers["cycled"] == [True] * 4
    of = jax.ShapeDtypeStruct
    wanted = {"even": of((4, 6), jnp.float32), "odd": of((3, 5), jnp.float32)}
    wanted |= {"wide": of((3, 10), jnp.float32), "bytes": of((6,), jnp.int8)}
    wanted |= {"scalar": of((), jnp.int32), "own": of((2, 4), jnp.float32)}
    params, _ = restore_parameters(folder.parent, lambda meta: wanted, key="k")
    np.testing.assert_array_equal(params["own"], [[1, -0.0, 3, 4], [5, 6, 7, 8]])
    np.testing.assert_array_equal(params["bytes"], [1, 2, 3, 4, 5, 6])
    sealed = json.loads((folder / "3" / "seal.json").read_text())["files"]
    folders = {part for name in sealed for part in name.split("/") if "process" in part}
    assert {"ocdbt.process_0", "ocdbt.process_1"} <= folders


def test_two_processes_agree_on_a_damaged_checkpoint(two):
    """Only one of them examines the file that is gone; both go back, and the first one says so."""
    folder, first, second = two
    (warning,) = [text for text in first.said if "is damaged" in text]
    assert f"{folder}/3 " in warning
    assert second.said == []
    for mine in (first, second):
        assert mine.answers["used"] == 2
        assert mine.answers["saved again"]
    assert sorted(os.listdir(folder)) == ["2", "3", "3.damaged", "5"]  # see below


def test_the_failure_of_one_process_is_a_failed_save_for_all(two):
    """Saves 4, 6 and 7 fail in the second process; the first one hears of it at once, not after
    the 20 minutes that a save may take, and says why. Two in a row end both. This run restored
    nothing, so it removes no older checkpoint.
    """
    folder, first, second = two
    cause = "No space left on device"
    failed = [text for text in first.said if cause in text]
    for line, step in zip([*failed, first.answers["ended"]], (4, 6, 7), strict=True):
        assert f"step {step} " in line and "process 1: " in line and cause in line
    assert "step 7 " in second.answers["ended"] and cause in second.answers["ended"]
    assert first.answers["good"] == second.answers["good"] == 5


def test_a_file_seen_late_is_not_damaged_and_one_never_seen_is(two):
    """The first process finds the file whole, so the others look again. Nothing is set aside."""
    folder, first, second = two
    assert first.answers["late"] == second.answers["late"] == 5
    for mine in (first, second):
        assert f"{folder}/5 " in mine.answers["never"] and "process 1" in mine.answers["never"]
    assert "a file is missing" in second.answers["never"], "the process that lacks it says why"
    assert (folder / "3").is_dir()


def test_hosts_that_do_not_share_a_disk_are_refused_in_all(two):
    """Each host may well have a folder of that name; what one writes the other does not see."""
    folder, first, second = two
    for what in ("absent", "another"):
        for mine in (first, second):
            assert mine.answers[what].startswith("base_output_directory: ")
        assert str(folder) in first.answers[what]
        assert f"Process 1 on {socket.gethostname()}: " in second.answers[what]


def test_a_folder_of_caches_is_shared_or_each_machine_s_own(two):
    """The first process makes it where it is not there, and leaves nothing in it.

    A process may have none, and the first one may not write there: nobody waits then.
    """
    folder, *both = two
    for mine in both:
        assert mine.answers["shared"] == [True, False, False, False, False]
        assert mine.answers["seconds"] < 3 * 1.2
    caches = folder.parents[2] / "base-caches"
    assert sorted(os.listdir(caches)) == ["of-0", "same"]
    assert os.listdir(caches / "of-0") == [] and os.listdir(caches / "same") == ["start"]
