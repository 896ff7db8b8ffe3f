"""moto as an S3 server in a process of its own, for tests: `with S3Server() as server:`."""

import os
import subprocess
import sys

from maxdiloco.storage import store

BUCKET = "fake-bucket"
_PROGRAM = """
import logging, threading
from moto.s3.models import s3_backends
from moto.server import ThreadedMotoServer

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
server.start()
s3_backends["123456789012"]["aws"].create_bucket("%s", "us-east-1")
print(server.get_host_and_port()[1], flush=True)
threading.Event().wait()
"""


class S3Server:
    """The server, with one bucket. It starts in about two seconds."""

    def __init__(self):
        command = [sys.executable, "-c", _PROGRAM % BUCKET]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        )
        self._port = 0

    def __enter__(self) -> "S3Server":
        self._port = int(self._process.stdout.readline())
        return self

    def __exit__(self, kind, exception, traceback) -> None:
        self._process.kill()
        self._process.communicate()

    def environ(self) -> dict[str, str]:
        """The variables that lead the clients here."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
        }

    def clear(self) -> None:
        """Delete all objects, with the variables of `environ` set."""
        bucket = store.connect("s3", BUCKET)
        names = [entry.name for entry in bucket.list_all("")]
        if names:
            bucket.delete(names)
