"""Who could have written a file: what runs as code may be of this user or of root only."""

import os
import stat

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def is_own(status: os.stat_result) -> bool:
    """Whether a file belongs to the user of this process or to root."""
    return status.st_uid in (os.geteuid(), 0)


def breach(status: os.stat_result, path: os.PathLike | str, *, again: str) -> str:
    """Say why others could have written a file or the files of a folder, and what to do about it.

    Args:
      status: of the file or folder.
      path: its path, for the remedy.
      again: the remedy where it belongs to another user, a clause in the imperative.

    Returns:
      Two sentences without a subject and a full stop, or an empty text where nobody else could.
    """
    if not is_own(status):
        return f"belongs to user {status.st_uid}, and a program runs what is in it. {again}"
    if status.st_mode & _OTHERS_WRITE:
        mode = f"{stat.S_IMODE(status.st_mode):o}"
        return (
            f"may be written by others (mode {mode}), and a program runs what is in it. If you "
            f"trust it, run chmod go-w {os.fspath(path)}"
        )
    return ""
