"""The run's folder as its processes see it: locked by the first one, and the same for all."""

import secrets
import socket
import time

import jax
from etils import epath

from maxdiloco.errors import CheckpointError
from maxdiloco.processes import agree, coordination
from maxdiloco.storage import object_store
from maxdiloco.storage.run_folder import reason

# A network file system may cache for up to a minute that a name is absent. Our choice.
WAIT_S = 60.0
PAUSE_S = 1.0
# Until the first process has the lock and has removed what was unfinished. Our choice.
PATIENCE_S = 1800.0


def meet() -> None:
    """Barrier of all processes, for as long as the first may wait for a lock or an object store.

    A collective would not do: gloo gives up after 30 s. Raises JaxRuntimeError.
    """
    if jax.process_count() > 1:
        coordination.barrier("maxdiloco/folder", timeout_s=PATIENCE_S)


def require(folder: epath.Path) -> None:
    """Raise CheckpointError in all processes unless all see what the first one writes to folder.

    The first process must have made the folder, where folders are made. A no-op for one process.
    """
    problem, blind = _look(folder)
    if blind:
        here = f" Process {jax.process_index()} on {socket.gethostname()}: {problem}."
        raise CheckpointError(
            f"base_output_directory: not every process of the run sees {folder} as process 0 does: "
            f"not {', '.join(map(str, blind))}.{here if problem else ''} Use a folder that all "
            "machines share, or gs://."
        )


def is_shared(folder: epath.Path) -> bool:
    """Whether all processes see what the first one writes to folder, which it makes if need be."""
    return not _look(folder, make=True)[1]


def _look(folder: epath.Path, *, make: bool = False) -> tuple[str | None, list[int]]:
    """Why this process does not see what the first one writes, if so, and those that do not."""
    if jax.process_count() == 1:
        return None, []
    meet()
    number = agree.from_first_process(secrets.randbelow(1 << 31))
    marker = folder / "start"
    problem = None
    if jax.process_index() == 0:
        problem = _write(marker, number, make=make)
    meet()
    if jax.process_index() != 0:
        problem = _wait_for(marker, number)
    blind = [p for p, seen in enumerate(agree.from_all(problem is None)) if not seen]
    if jax.process_index() == 0 and problem is None:
        marker.unlink(missing_ok=True)
    return problem, blind


def _write(marker: epath.Path, number: int, *, make: bool) -> str | None:
    try:
        if make:
            marker.parent.mkdir(parents=True, exist_ok=True)
        marker.write_text(str(number))
    except (OSError, *object_store.errors(marker)) as error:
        return reason(error)
    return None


def _wait_for(marker: epath.Path, number: int) -> str | None:
    """Why the marker with this number cannot be read within WAIT_S; None when it can."""
    limit = time.monotonic() + WAIT_S
    while True:
        try:
            text = marker.read_text()
            problem = "it is another folder of the same name"
        except (OSError, *object_store.errors(marker)) as error:
            text, problem = "", reason(error)
        if text == str(number):
            return None
        if time.monotonic() >= limit:
            return problem
        time.sleep(PAUSE_S)
