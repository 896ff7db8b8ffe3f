"""META and the seal as a damaged disk or another person may leave them: refused before use."""

import json
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_tools import folder_of, items, wanted

from maxdiloco.checkpoint import read, seal
from maxdiloco.checkpoint.checkpointer import Checkpointer
from maxdiloco.checkpoint.read import restore_from
from maxdiloco.errors import CheckpointError

META = {
    "config": {"steps": 1}, "tokenizer": "", "contents": "", "num_replicas": 2,
    "mesh": {"diloco": 2}, "position": {"base": 0, "s0": 1, "M": 2, "B": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a run with the checkpoints 10 and 20."""
    path = tmp_path_factory.mktemp("saved")
    with Checkpointer(folder_of(path), max_to_keep=None) as checkpointer:
        for step in (10, 20):
            checkpointer.save(step, items(step), META)
    return path


@pytest.fixture
def newest(tmp_path, saved):
    """The newest checkpoint of a copy of that run."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    return pathlib.Path(folder_of(tmp_path)) / "20"


def rewrite(newest, change):
    """Change the fields of META and seal the checkpoint again, as a stranger would."""
    meta = newest / "meta" / "metadata"
    stored = json.loads(meta.read_text())
    meta.write_text(json.dumps(change(stored) or stored))
    seal.write(folder_of(newest.parents[2]) / "20")


def assert_not_used(newest):
    """The newest checkpoint is damaged for every reader, which uses the one before it."""
    run = newest.parents[1]
    lines = []
    with Checkpointer(newest.parent, max_to_keep=None, say=lines.append) as checkpointer:
        assert checkpointer.restore(wanted).step == 10
    assert len(lines) == 1 and f"{newest} " in lines[0]
    assert restore_from(run, wanted, key="RUN").step == 10
    assert read.newest_meta(run, key="RUN") == META
    with pytest.raises(CheckpointError) as caught:
        restore_from(newest, wanted, key="RUN")
    assert "\n" not in str(caught.value)


def test_no_flipped_bit_of_meta_reaches_a_reader(newest):
    meta, run = newest / "meta" / "metadata", newest.parents[1]
    content = meta.read_bytes()
    rewrite(newest, lambda stored: stored["meta"].update(tokenizer="newest"))
    content = meta.read_bytes()
    assert read.newest_meta(run, key="RUN")["tokenizer"] == "newest"  # the positive control
    for place in range(0, len(content), 3):
        flipped = content[place] ^ (1 << place % 7)
        meta.write_bytes(content[:place] + bytes([flipped]) + content[place + 1 :])
        assert read.newest_meta(run, key="RUN") == META, place
    assert_not_used(newest)


WRONG = {
    "position without B": lambda note: note["meta"]["position"].pop("B"),
    "a position of text": lambda note: note["meta"]["position"].update(M="2"),
    "contents of a list": lambda note: note["meta"].update(contents=[]),
    "a config of a list": lambda note: note["meta"].update(config=[1]),
    "no replicas": lambda note: note["meta"].update(num_replicas=0),
    "replicas beyond int64": lambda note: note["meta"].update(num_replicas=10**30),
    "a mesh of infinity": lambda note: note["meta"].update(mesh={"diloco": 1e999}),
    "outer parameters of another item": lambda note: note["meta"].update(outer_item="../x"),
    "an exchange of one field": lambda note: note["meta"].update(exchange={"offsets": [0]}),
    "sums of no replica": lambda note: note["meta"].update(since_row={"row": 1, "loss": []}),
    "a negative step": lambda note: note.update(step=-1),
    "arrays of text": lambda note: note.update(arrays={"params": {"w": "float32"}}),
    "a meta of a list": lambda note: note.update(meta=[]),
    "a field too many": lambda note: note.update(more=1),
    "a format of text": lambda note: note.update(format="1"),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_meta_that_no_save_writes_is_damage_though_sealed(newest, change):
    rewrite(newest, lambda note: change(note) and None)
    assert_not_used(newest)


def test_a_number_of_5000_digits_in_meta_is_damage(newest):
    meta = newest / "meta" / "metadata"
    text = meta.read_text().replace('"num_replicas": 2', f'"num_replicas": {"9" * 5000}')
    meta.write_text(text)
    seal.write(folder_of(newest.parents[2]) / "20")
    assert_not_used(newest)


def test_a_checkpoint_of_another_program_is_refused_by_field(newest):
    """It is whole, so it is not set aside as damaged."""
    rewrite(newest, lambda note: note["meta"].pop("config") and None)
    for call in (
        lambda: read.newest_meta(newest.parents[1], key="RUN"),
        lambda: restore_from(newest, wanted, key="RUN", needs=["position", "config"]),
    ):
        with pytest.raises(CheckpointError, match=f"{newest} .*config"):
            call()
    assert restore_from(newest, wanted, key="RUN").step == 20


def sealed(newest, name, size, crc32=None):
    """Add a file to the seal."""
    path = newest / "seal.json"
    listed = json.loads(path.read_text())
    listed["files"][name] = [size, crc32]
    path.write_text(json.dumps(listed).replace("Infinity", "1e999"))


OUTSIDE = ["/dev/zero", "../../../outside", "meta/../../10/seal.json", "a//b", "./a", "", "a\0b"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_seal_that_names_a_file_outside_is_damage(newest, name):
    (newest.parents[2] / "outside").write_bytes(b"12345")
    sealed(newest, name, 5, crc32=0)
    assert seal.damage(folder_of(newest.parents[2]) / "20").index == seal.SEAL
    assert_not_used(newest)


@pytest.mark.timeout(60)
def test_a_sealed_link_out_of_the_folder_or_a_fifo_is_damage(newest):
    folder = folder_of(newest.parents[2]) / "20"
    outside = newest.parents[2] / "outside"
    outside.write_bytes(b"12345")
    (newest / "meta" / "inside").write_bytes(b"12345")
    (newest / "meta" / "x").symlink_to("inside")
    sealed(newest, "meta/inside", 5)
    sealed(newest, "meta/x", 5)
    assert seal.damage(folder) is None  # the positive control
    for target in (outside, "/dev/zero"):
        (newest / "meta" / "x").unlink()
        (newest / "meta" / "x").symlink_to(target)
        assert "meta/x" in seal.damage(folder).what
    (newest / "meta" / "x").unlink()
    os.mkfifo(newest / "meta" / "x")
    sealed(newest, "meta/x", 0, crc32=1)
    assert "meta/x" in seal.damage(folder).what
    assert_not_used(newest)


@pytest.mark.parametrize("size", [float("inf"), -1, 1.5, True, "5", None, [5]])
def test_a_sealed_size_that_is_not_a_whole_number_is_damage(newest, size):
    sealed(newest, "meta/metadata", size)
    assert_not_used(newest)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["seal.json", "meta/metadata"])
def test_a_fifo_in_place_of_meta_or_seal_is_damage(newest, name):
    (newest / name).unlink()
    os.mkfifo(newest / name)
    assert_not_used(newest)


def test_a_diagnostic_more_or_less_than_saved_begins_at_zero(tmp_path):
    """What is only logged; a leaf of any other item that differs is refused."""
    norm, drift = jnp.full(3, 2.0), jnp.full(2, 3.0)
    kept = {"params": {"w": jnp.ones(2)}, "diagnostics": {"sizes": (norm, drift), "old": norm}}
    with Checkpointer(folder_of(tmp_path), max_to_keep=None) as checkpointer:
        checkpointer.save(1, kept, {})
        checkpointer.save(2, {"params": kept["params"]}, {})
    new = {"sizes": (norm, jnp.zeros(5), jnp.zeros(())), "added": jnp.zeros((2, 2), jnp.int32)}
    like = jax.eval_shape(lambda: kept | {"diagnostics": new})
    for step, first in ((1, norm), (2, jnp.zeros(3))):
        folder = folder_of(tmp_path) / str(step)
        found = restore_from(folder, lambda meta: like, key="k").items["diagnostics"]
        expected = new | {"sizes": (first, *new["sizes"][1:])}
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    other = {"params": {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}}
    with pytest.raises(CheckpointError, match=r"params\.w .*float32\[2\]"):
        restore_from(folder, lambda meta: other, key="k")
