"""A small ext4 in a file whose power can be cut: what was not synced is gone."""

import contextlib
import fcntl
import os
import shutil
import subprocess
import time
from types import SimpleNamespace

import pytest

_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN = _IOR('X', 125, __u32), linux/fs/ext4/ext4.h
_NOLOGFLUSH = 2  # EXT4_GOING_FLAGS_NOLOGFLUSH: without writing the journal, as a cut of the power
IMAGE_BYTES = 64 << 20


def _run(*command):
    return subprocess.run(command, capture_output=True, text=True)


@contextlib.contextmanager
def small_ext4(folder):
    """An ext4 in a folder: .path, where it is mounted, and .cut(), which cuts its power and mounts
    what is left. Skips the test where there cannot be one."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("mounting an ext4 takes root and mkfs.ext4")
    image, path = folder / "image", folder / "mount"

    def mount():
        # commit: the journal would otherwise write by itself what is older than 5 s.
        done = _run("mount", "-o", "loop,commit=300", image, path)
        if done.returncode:
            pytest.skip(f"a file system in a file cannot be mounted here: {done.stderr.strip()}")

    def cut():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, _NOLOGFLUSH.to_bytes(4, "little"))
        finally:
            os.close(descriptor)
        for _ in range(100):  # a thread that meets the dead disk may still hold a file
            if _run("umount", path).returncode == 0:
                return mount()
            time.sleep(0.1)
        raise AssertionError(_run("fuser", "-vm", path).stderr)

    path.mkdir()
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    mount()
    try:
        yield SimpleNamespace(path=path, cut=cut)
    finally:
        _run("umount", "--lazy", path)
