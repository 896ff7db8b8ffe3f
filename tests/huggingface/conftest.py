"""The clouds, and a model to import."""

import pytest
import small_models as small
from cloud_fixtures import cloud, faulty, gcs, no_clients, s3, s3_server  # noqa: F401  fixtures


@pytest.fixture
def source(tmp_path):
    return small.save(tmp_path / "source", small.weights())
