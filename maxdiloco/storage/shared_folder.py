"""Check that all processes of a run see the same folder: the run's, and a compile cache."""

import secrets
import socket
import time

import jax
from etils import epath

from maxdiloco.cluster import agree, coordination
from maxdiloco.errors import CheckpointError
from maxdiloco.storage.os_errors import reason

WAIT_S = 60.0  # a network file system may cache for up to a minute that a name is absent
SHORT_WAIT_S = 5.0  # for a new name, which cannot be cached
PAUSE_S = 1.0  # between two looks
# Until the first process has the lock and has removed unfinished saves, which may be many files.
BARRIER_S = 1800.0


def barrier() -> None:
    """Wait for all processes, as long as the first one may wait for a lock.

    A collective gives up after 30 s.
    """
    if jax.process_count() > 1:
        coordination.barrier("maxdiloco/folder", "opened its folders", timeout_s=BARRIER_S)


def require(folder: epath.Path) -> None:
    """Require that all processes see the same folder.

    Raises:
      CheckpointError: one process does not see a file that the first one writes there. All
        processes raise it.
    """
    problem, blind = _probe(folder, name="maxdiloco-start", wait_s=WAIT_S)
    if blind:
        here = f" Process {jax.process_index()} on {socket.gethostname()}: {problem}."
        raise CheckpointError(
            f"base_output_directory: process {', '.join(map(str, blind))} does not see the same "
            f"{folder} as process 0.{here if problem else ''} Use a folder that all machines "
            "share, or a bucket."
        )


def is_shared(folder: epath.Path | None) -> bool:
    """Tell whether all processes see a file that the first one writes to the folder.

    The first process makes the folder. Runs may share it, so the file has a random name, which no
    file system can have cached as absent.

    Args:
      folder: as this process names it; None if it has none.
    """
    return not _probe(folder, name="seen-{}", wait_s=SHORT_WAIT_S)[1]


def _probe(folder: epath.Path | None, name: str, wait_s: float) -> tuple[str | None, list[int]]:
    """Return the problem of this process or None, and the numbers of all processes with one."""
    if jax.process_count() == 1:
        return None, []
    barrier()
    primary = jax.process_index() == 0
    number = agree.from_first_process(secrets.randbelow(1 << 31))
    marker = None if folder is None else folder / name.format(number)
    problem = "it has no such folder" if folder is None else None
    if primary and marker is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            marker.write_text(str(number))
        except OSError as error:
            problem = reason(error)
    barrier()
    if agree.from_first_process(problem is not None):  # nothing to wait for
        return problem or "process 0 cannot write to it", list(range(jax.process_count()))
    if not primary and marker is not None:
        problem = _wait_for(marker, number, wait_s)
    blind = [p for p, seen in enumerate(agree.from_all(problem is None)) if not seen]
    if primary:
        marker.unlink(missing_ok=True)
    return problem, blind


def _wait_for(marker, number, wait_s):
    """Return why the marker with this number cannot be read within wait_s; None if it can."""
    limit = time.monotonic() + wait_s
    while True:
        try:
            if marker.read_text() == str(number):
                return None
            problem = "it is another folder of the same name"
        except OSError as error:
            problem = reason(error)
        if time.monotonic() >= limit:
            return problem
        time.sleep(PAUSE_S)
