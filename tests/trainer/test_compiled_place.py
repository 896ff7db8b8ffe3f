"""Where compiled programs and reports cannot be read from or written to."""

import os

import pytest

from maxdiloco.errors import ConfigError
from maxdiloco.trainer import compiled_file


@pytest.mark.parametrize("place", ["/dev/full", "/dev/zero", "fifo", "."])
def test_what_is_no_file_is_neither_read_nor_replaced(tmp_path, place):
    """/dev/full is read until memory ends, a pipe is waited for, and a device was moved away."""
    if place == "fifo":
        place = str(tmp_path / "fifo")
        os.mkfifo(place)
    place = str(tmp_path) if place == "." else place
    with pytest.raises(ConfigError, match=f"compiled_trainstep_file={place} .*: not a file. Make"):
        compiled_file._opened(place)
    with pytest.raises(ConfigError, match=f"report={place} is no file: .* Give the path"):
        compiled_file.check_place("report", place)
    assert not os.path.exists(f"{place}.part")


def test_a_disk_that_is_full_at_the_end_is_one_line_and_leaves_the_old_file(tmp_path):
    path = tmp_path / "programs"
    compiled_file.write_whole("compiled_trainstep_file", str(path), b"old")
    (tmp_path / "programs.part").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match="cannot be written: No space left .* free space"):
        compiled_file.write_whole("compiled_trainstep_file", str(path), b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("programs", b"old")]
