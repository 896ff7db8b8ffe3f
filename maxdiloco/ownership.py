"""Check the owner and mode of files that run as code: only this user or root may write them."""

import os
import stat

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def is_own(status: os.stat_result) -> bool:
    """Return whether a file belongs to the user of this process or to root."""
    return status.st_uid in (os.geteuid(), 0)


def problem(status: os.stat_result, path: os.PathLike | str, *, remedy: str) -> str:
    """Return why another user could have written a file or the files of a folder, and a remedy.

    Args:
      status: status of the file or folder.
      path: path of the file or folder, for the remedy.
      remedy: the remedy if another user owns it, a clause in the imperative.

    Returns:
      Two sentences, without the subject of the first and the last full stop. An empty text if no
      other user could have written it.
    """
    if not is_own(status):
        return f"belongs to user {status.st_uid}, and a program runs code from it. {remedy}"
    if status.st_mode & _OTHERS_WRITE:
        mode = f"{stat.S_IMODE(status.st_mode):o}"
        return (
            f"may be written by others (mode {mode}), and a program runs code from it. If you "
            f"trust it, run chmod go-w {os.fspath(path)}"
        )
    return ""
