"""A nearly full disk: old checkpoints make room for the next one, the last good one stays."""

import jax
import numpy as np
import pytest

from maxdiloco.checkpoint import room, seal
from maxdiloco.checkpoint.checkpointer import Checkpointer
from maxdiloco.storage import run_folder

VALUES = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)
NBYTES = VALUES.nbytes


def used(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """Sets the size of a disk that holds the checkpoints of tmp_path and nothing else."""
    usage = run_folder.shutil.disk_usage(tmp_path)
    size = [10 * NBYTES]

    def disk_usage(path):
        path.stat()  # as the real one
        return usage._replace(free=size[0] - used(tmp_path))

    monkeypatch.setattr(run_folder.shutil, "disk_usage", disk_usage)
    return lambda nbytes: size.__setitem__(0, nbytes)


@pytest.fixture
def opened(tmp_path, disk):
    said = []
    with Checkpointer(tmp_path, max_to_keep=3, say=said.append) as checkpointer:
        yield checkpointer, said


def save(checkpointer, step):
    checkpointer.save(step, {"outer_params": {"w": jax.device_put(VALUES)}}, {})
    checkpointer.wait()


def test_the_oldest_make_room_where_that_suffices_and_no_more_than_needed(disk, opened):
    """Room for two and a half: of 1 and 2 the first goes; then of 2 and 3."""
    checkpointer, said = opened
    save(checkpointer, 1)
    disk(5 * NBYTES // 2 + seal.nbytes(checkpointer._folder / "1") - NBYTES)
    save(checkpointer, 2)
    assert checkpointer.steps() == [1, 2] and said == []
    save(checkpointer, 3)
    assert checkpointer.steps() == [2, 3]
    (line,) = said
    assert "nearly full: checkpoint 1 was removed to make room for 3" in line
    save(checkpointer, 4)
    assert checkpointer.steps() == [3, 4]


def test_nothing_is_removed_where_it_would_not_suffice_and_the_last_good_one_never(disk, opened):
    checkpointer, said = opened
    for step in (1, 2):
        save(checkpointer, step)
    disk(3 * NBYTES // 2)  # with 2 kept there is never room for another
    save(checkpointer, 3)
    assert checkpointer.steps() == [1, 2]
    assert "step 3 could not be saved" in said[0] and "the last step saved is 2" in said[0]
    disk(5 * NBYTES)
    save(checkpointer, 4)
    assert checkpointer.steps() == [1, 2, 4]


def test_a_line_tells_at_the_start_when_the_disk_is_too_small_for_all_that_are_kept(disk, opened):
    """Those that are there count as room."""
    checkpointer, _ = opened
    save(checkpointer, 1)
    disk(4 * NBYTES)
    assert checkpointer.shortage(NBYTES) == []
    disk(2 * NBYTES)
    folder = checkpointer._folder / "not" / "made"
    assert room.shortage(folder, NBYTES, count=1, own=()) == []
    (line,) = checkpointer.shortage(NBYTES)
    assert "max_num_checkpoints_to_keep=3 checkpoints take up to 0.2 MB" in line
    assert f"{checkpointer._folder} has 0.2 MB for them" in line
