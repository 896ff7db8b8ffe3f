"""The clouds."""

from cloud_fixtures import cloud, faulty, gcs, no_clients, s3, s3_server  # noqa: F401  fixtures
