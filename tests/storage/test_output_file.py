"""Files that a command writes: refused paths, and the old contents when the disk is full."""

import os

import pytest

from maxdiloco.errors import ConfigError
from maxdiloco.storage import durable, output_file


@pytest.mark.parametrize("place", ["/dev/full", "/dev/zero", "fifo", "."])
def test_an_output_path_that_is_not_a_file_is_refused(tmp_path, place):
    """A pipe would be waited for, and a device moved away."""
    if place == "fifo":
        place = str(tmp_path / "fifo")
        os.mkfifo(place)
    place = str(tmp_path) if place == "." else place
    with pytest.raises(ConfigError, match=f"report={place}"):
        output_file.check_path("report", place)
    assert not list(tmp_path.glob("*.part"))


def test_a_full_disk_leaves_the_old_file_and_other_files(tmp_path, monkeypatch):
    path = tmp_path / "programs"
    (tmp_path / "programs.part").write_bytes(b"mine")
    output_file.check_path("out", str(path))
    output_file.write_whole("out", str(path), b"old")
    (tmp_path / "programs.1.part").symlink_to("/dev/full")
    monkeypatch.setattr(durable.secrets, "token_hex", lambda count: "1")
    with pytest.raises(ConfigError, match=f"out={path}.*No space left on device"):
        output_file.write_whole("out", str(path), b"new")
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert files == {"programs": b"old", "programs.part": b"mine"}
