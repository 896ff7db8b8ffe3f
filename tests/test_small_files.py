"""Bounded reads: regular files of a limited size, without waiting for anything else."""

import errno
import os

import pytest

from maxdiloco import small_files


def test_a_file_up_to_the_limit_is_read_and_a_larger_one_is_refused(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert small_files.read_bytes(path, max_bytes=5) == b"12345"
    with pytest.raises(OSError, match=r"\b4 bytes") as caught:
        small_files.read_bytes(path, max_bytes=4)
    assert caught.value.errno == errno.EFBIG and caught.value.filename == str(path)


@pytest.mark.timeout(20)
def test_a_fifo_or_device_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", "/dev/zero", "/dev/null"):
        with pytest.raises(OSError, match=str(path)):
            small_files.read_bytes(path)


def test_a_folder_and_an_absent_file_keep_their_error_types(tmp_path):
    with pytest.raises(IsADirectoryError):
        small_files.read_bytes(tmp_path)
    for path in (tmp_path / "b", "gs://bucket/a"):  # the latter: a text is a local path
        with pytest.raises(FileNotFoundError):
            small_files.read_bytes(path)


def test_a_file_that_claims_no_size_is_read_up_to_the_limit_only():
    with pytest.raises(OSError, match=r"\b8 bytes"):
        small_files.read_bytes("/proc/self/status", max_bytes=8)
