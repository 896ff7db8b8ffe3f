"""Files that a command writes where its user asked for them: `report=`, `out=`, `output=`."""

import contextlib
import json
import os
from typing import Any

from etils import epath

from maxdiloco.errors import ConfigError
from maxdiloco.storage import durable
from maxdiloco.storage.os_errors import replace_os_error
from maxdiloco.storage.run_folder import absolute, is_local


def check_path(key: str, path: str) -> None:
    """Make the folder of a file that will be written, and try to write there.

    Args:
      key: the option that gave the path, for messages.
      path: local or in a bucket; "" for none.

    Raises:
      ConfigError: the path is a folder, a pipe or a device, or nothing can be written there.
    """
    if not path:
        return
    if is_local(path) and os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError(
            f"{key}={path} is not a file, and writing would replace it. Give the path of a file."
        )
    with _refusing_os_errors(key, path):
        target = _absolute(key, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        probe = durable.temp_sibling(target)
        probe.write_bytes(b"")
        probe.unlink()


def write_whole(key: str, path: str, content: bytes) -> None:
    """Write a file that appears whole or not at all.

    Raises:
      ConfigError: it cannot be written.
    """
    with _refusing_os_errors(key, path), durable.atomic_write(_absolute(key, path)) as part:
        part.write_bytes(content)


def write_json(key: str, path: str, content: Any) -> None:
    """Write a JSON file; path "" writes none. Raises as write_whole."""
    if path:
        write_whole(key, path, f"{json.dumps(content, indent=1)}\n".encode())


def _absolute(key: str, path: str) -> epath.Path:
    return epath.Path(path) if is_local(path) else absolute(path, key=key)


def _refusing_os_errors(key: str, path: str) -> contextlib.AbstractContextManager[None]:
    remedy = "Give the path of a file in a folder that can be written and has free space."
    return replace_os_error(ConfigError, f"{key}={path} cannot be written", remedy)
