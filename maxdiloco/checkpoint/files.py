"""Names of the files of a checkpoint, and how to tell a complete one."""

from etils import epath

from maxdiloco.storage.run_folder import is_local

META = "meta"  # the item that is JSON; the others are trees of arrays
META_FILE = "metadata"  # Orbax's name of its file
COMMIT = "commit_success.txt"  # Orbax writes it last
SEAL = "seal.json"


def is_complete(step_folder: epath.Path) -> bool:
    """Tell whether a folder appeared as a whole checkpoint: only checkpoints have these files."""
    if is_local(step_folder):  # it got this name by an atomic rename; damage may remove either file
        return any((step_folder / name).exists() for name in (SEAL, COMMIT))
    return (step_folder / COMMIT).exists()
