"""A run's folder, made and empty, and a bucket in memory."""

import pytest
from cloud_fixtures import faulty, no_clients  # noqa: F401  fixtures

from maxdiloco.storage.run_folder import locate


@pytest.fixture
def folder(tmp_path):
    found = locate(tmp_path, "run")
    found.path.mkdir()
    return found
