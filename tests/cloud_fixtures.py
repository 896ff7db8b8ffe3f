"""The clouds as fixtures: servers of our own for gs:// and https://, moto for s3://, obstore's
memory for az://.

A conftest imports those that its folder uses.
"""

import pytest
from fake_gcs import FakeGcs
from faulty_store import FaultyStore
from https_server import HttpsServer
from s3_server import S3Server

from maxdiloco.storage import object_store, store


@pytest.fixture
def no_clients(monkeypatch):
    """No client of a server that another test had."""
    monkeypatch.setattr(object_store.BucketPath, "_buckets", {})


@pytest.fixture
def faulty(monkeypatch, no_clients):
    """Every bucket is this one, in memory, whose requests a test may let go wrong."""
    found = FaultyStore()
    monkeypatch.setattr(store, "connect", found.connect)
    return found


def _set_all(monkeypatch, environ):
    for key, value in environ.items():
        monkeypatch.setenv(key, value)


@pytest.fixture
def gcs(monkeypatch, no_clients):
    """A server for gs://."""
    with FakeGcs(page=3) as found:
        _set_all(monkeypatch, found.environ())
        yield found


@pytest.fixture
def https(monkeypatch, no_clients, tmp_path_factory):
    """A server for https://, without a file."""
    monkeypatch.setattr(store, "RETRY_S", 0.5)
    with HttpsServer({}, tmp_path_factory.mktemp("certificate")) as found:
        _set_all(monkeypatch, found.environ)
        yield found


@pytest.fixture(scope="session")
def s3_server():
    with S3Server() as found:
        yield found


@pytest.fixture
def s3(s3_server, monkeypatch, no_clients):
    """A server for s3://."""
    _set_all(monkeypatch, s3_server.environ())
    s3_server.clear()
    return s3_server


@pytest.fixture(params=["gs", "s3", "az"])
def cloud(request):
    """Each cloud by its scheme."""
    request.getfixturevalue({"gs": "gcs", "s3": "s3", "az": "faulty"}[request.param])
    return request.param
