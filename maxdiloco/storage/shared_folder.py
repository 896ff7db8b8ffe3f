"""Folders as the processes of a run see them: the run's, and that of a compile cache."""

import secrets
import socket
import time

import jax
from etils import epath

from maxdiloco.cluster import agree, coordination
from maxdiloco.errors import CheckpointError
from maxdiloco.storage.run_folder import reason

# All our choice.
WAIT_S = 60.0  # a network file system may cache for up to a minute that a name is absent
SHORT_WAIT_S = 5.0  # where nothing can be cached
PAUSE_S = 1.0
PATIENCE_S = 1800.0  # until the first process has the lock and has removed what was unfinished


def meet() -> None:
    """Barrier for as long as the first may wait for a lock; a collective gives up after 30 s."""
    if jax.process_count() > 1:
        coordination.barrier("maxdiloco/folder", "opened its folders", timeout_s=PATIENCE_S)


def require(folder: epath.Path) -> None:
    """Raise CheckpointError in all unless all see what the first one writes to its folder."""
    problem, blind = _look(folder, name="maxdiloco-start", wait_s=WAIT_S)
    if blind:
        here = f" Process {jax.process_index()} on {socket.gethostname()}: {problem}."
        raise CheckpointError(
            f"base_output_directory: not every process of the run sees {folder} as process 0 does: "
            f"not {', '.join(map(str, blind))}.{here if problem else ''} Use a folder that all "
            "machines share, or a bucket."
        )


def is_shared(folder: epath.Path | None) -> bool:
    """Whether all processes see what the first one writes to folder, which it makes. None: this
    process has none. Runs may share the folder, so the file has a name of its own, which no file
    system can have cached as absent."""
    return not _look(folder, name="seen-{}", wait_s=SHORT_WAIT_S)[1]


def _look(folder: epath.Path | None, name: str, wait_s: float) -> tuple[str | None, list[int]]:
    """This process's problem, if it has one, and the numbers of the processes that have one."""
    if jax.process_count() == 1:
        return None, []
    meet()
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
    meet()
    if agree.from_first_process(problem is not None):  # nothing to wait for
        return problem or "process 0 cannot write to it", list(range(jax.process_count()))
    if not primary and marker is not None:
        problem = _wait_for(marker, number, wait_s)
    blind = [p for p, seen in enumerate(agree.from_all(problem is None)) if not seen]
    if primary:
        marker.unlink(missing_ok=True)
    return problem, blind


def _wait_for(marker, number, wait_s):
    """Why the marker with this number cannot be read within wait_s; None when it can."""
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
