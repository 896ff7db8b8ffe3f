"""python -m maxdiloco.prepare into a bucket, with processes that are killed."""

import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
from fake_gcs import BUCKET
from run import names_key

from maxdiloco import prepare
from maxdiloco.storage import store

WAIT_S = 300
# The program, for which a lock is stale after three seconds.
STALE_AFTER_3_S = """
from maxdiloco import prepare
from maxdiloco.storage import object_lock

object_lock.RENEW_S, object_lock.STALE_S = 0.5, 3.0
prepare.main()
"""


def children(pid):
    """Processes that a process has started."""
    files = pathlib.Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]


@pytest.mark.full
@pytest.mark.parametrize(("scheme", "server"), [("gs", "gcs"), ("s3", "s3")])
def test_a_killed_preparation_resumes_to_the_bytes_of_one_on_a_disk(
    scheme, server, request, tmp_path
):
    """As in test_prepare.py for a disk: SIGKILL when there is a part, and when there are more.
    Before the first kill the processes that tokenise are stopped: the lock is renewed, and a second
    preparation is refused."""
    request.getfixturevalue(server)
    lines, quiet = tmp_path / "a.jsonl", tmp_path / "quiet"
    draw, words = random.Random(0), [f"word{number}" for number in range(500)]
    with lines.open("w") as file:
        for _ in range(2000):
            file.write(json.dumps({"text": " ".join(draw.choices(words, k=1300))}) + "\n")
    assert prepare.main([str(lines), f"out={quiet}", "part_mb=1", "processes=1"]) == 0
    bucket, out = store.connect(scheme, BUCKET), f"{scheme}://{BUCKET}/shards"
    (tmp_path / "tmp").mkdir()
    environ = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    command = [sys.executable, "-c", STALE_AFTER_3_S, str(lines), f"out={out}", "part_mb=1"]
    two = dict(args=[*command, "processes=2"], env=environ, text=True)
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def facts():
        names = [entry.name for entry in bucket.list_all("shards")]
        return len([name for name in names if "/part-" in name and name.endswith(".json")])

    kills = 0
    for parts in (1, 4, 8):
        with subprocess.Popen(**two, stdout=subprocess.DEVNULL) as process:
            deadline = time.monotonic() + WAIT_S
            while process.poll() is None and facts() < parts:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            kills += process.poll() is None
            if parts == 1:
                for child in children(process.pid):
                    os.kill(child, signal.SIGSTOP)
                second = subprocess.run(**two, **pipes, timeout=WAIT_S)
            left = children(process.pid)
            process.send_signal(signal.SIGKILL)
            for child in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
    assert kills, "the first kill comes long before the end"
    assert second.returncode == 2
    assert names_key(second.stderr, "out")
    done = subprocess.run(**two, **pipes, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    assert "parts were done before" in done.stdout or "nothing to do" in done.stdout
    found = {e.name.removeprefix("shards/"): bucket.get(e.name) for e in bucket.list_all("shards")}
    paths = [path for path in quiet.rglob("*") if path.is_file() and path.name != "lock"]
    same = found == {str(path.relative_to(quiet)): path.read_bytes() for path in paths}
    assert same and len(found) > 20
    assert os.listdir(tmp_path / "tmp") == []
