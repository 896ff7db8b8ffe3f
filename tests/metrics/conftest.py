"""A run's folder, made and empty."""

import pytest

from maxdiloco.storage.run_folder import locate


@pytest.fixture
def folder(tmp_path):
    found = locate(tmp_path, "run")
    found.path.mkdir()
    return found
