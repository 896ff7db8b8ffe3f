"""What the package takes from JAX that has no public name."""

import pathlib

import maxdiloco


def test_one_file_alone_imports_what_is_private_to_jax():
    """JAX may change it in any version: then this file is the one to mend."""
    folder = pathlib.Path(maxdiloco.__file__).parent
    users = {path.name for path in folder.rglob("*.py") if "jax._src" in path.read_text()}
    assert users == {"coordination.py"}
