"""python -m maxdiloco.islands audit, check and status, on logs that islands wrote."""

import json
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from s3_server import BUCKET, S3Server
from together import a_run, in_lockstep

from maxdiloco.islands import audit, log_store, outer_step, records, store_check
from maxdiloco.islands.__main__ import main
from maxdiloco.storage import store

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A log in a folder: two islands, snapshots after each second record."""
    folder = tmp_path_factory.mktemp("log")
    run = a_run(wire_down="int8", snapshot_every=2, islands_min=2)
    islands = in_lockstep(store.local_folder(folder), run, "ab", 25)
    return folder, run, [state.digest() for state in islands[0].outer]


@pytest.fixture
def folder(written, tmp_path):
    """A copy that may be damaged."""
    return shutil.copytree(written[0], tmp_path / "log")


def test_audit_replays_a_log_without_jax(written):
    folder, _, digests = written
    code = (
        "import sys; from maxdiloco.islands.__main__ import main; "
        f"code = main(['audit', {str(folder)!r}]); print(code, 'jax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=60
    )
    *rows, zero, one, agree, last = done.stdout.splitlines()
    assert last == "0 False" and done.stderr == ""
    assert agree
    assert [row.split()[0] for row in rows] == ["island", "a", "b"]
    for fragment, line in enumerate((zero, one)):
        tokens = (384, 352)[fragment]
        # Of 6 records 2 are computed again, both from their members: older messages and gradients
        # are deleted below the last two snapshots.
        assert re.findall(r"\b\d+\b", line)[:5] == [str(fragment), "6", "2", "2", str(tokens)]
        assert digests[fragment][:12] in line
    assert not list(folder.glob("g/0/1.*")) and list(folder.glob("g/0/6.*"))


@pytest.mark.full
def test_a_folder_of_a_bucket_is_fit_written_and_audited(monkeypatch, capsys):
    url = f"s3://{BUCKET}/runs/a"
    run = a_run(fragments=a_run().fragments[1:], islands_min=2)
    with S3Server() as server:
        for key, value in server.environ().items():
            monkeypatch.setenv(key, value)
        assert main(["check", url]) == 0
        in_lockstep(log_store.open_bucket(url), run, "ab", 9)
        assert main(["audit", url]) == 0 and main(["status", url, "wait=0.01"]) == 0
        assert {e.name.split("/")[0] for e in store.connect("s3", BUCKET).list_all("")} == {"runs"}
    assert re.search(r"fragment 0: 2 .*2 ", capsys.readouterr().out)


def edited(path, change):
    """The object with other JSON, the payload as it was."""
    first, text, payload = path.read_bytes().split(b"\n", 2)
    change(value := json.loads(text))
    text = json.dumps(value, separators=(",", ":")).encode()
    path.write_bytes(b"\n".join([first, text, payload]))


def flipped(path):
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def shortened(path):
    path.write_bytes(path.read_bytes()[:-1])


def gradient(folder, name):
    """The file of the one that a record names."""
    record, _ = records.decode(name, (folder / name).read_bytes())
    return folder / records.gradient_name(record)


def forged(folder, name):
    """A record whose gradient is zero, with all its sha256."""
    record, _ = records.decode(name, (folder / name).read_bytes())
    sizes = outer_step.sizes_of(a_run(), record.fragment)
    payload = outer_step.encode("int8", sizes, np.zeros(sum(sizes), np.float32))
    value = records.Gradient(record.fragment, record.number, records.sha256(payload))
    gradient(folder, name).write_bytes(records.encode(value, payload))
    edited(folder / name, lambda record: record.update(gradient=value.sha256))


DAMAGES = {  # what is done to a folder, and the object that the audit names
    "another mean": (lambda f: forged(f, "c/0/6"), "c/0/6"),
    "a bad member": (
        lambda f: edited(f / "u/0/b.1.6", lambda m: m.update(finite=False)),
        "u/0/b.1.6",
    ),
    "a gradient": (lambda f: flipped(gradient(f, "c/1/5")), "g/1/5"),
    "a gradient is gone": (lambda f: gradient(f, "c/0/6").unlink(), "g/0/6"),
    "a message": (lambda f: flipped(f / "u/0/b.1.6"), "c/0/6 .*'b', 1, 6"),
    "a record": (lambda f: (f / "c/0/3").unlink(), "c/0/3"),
    "a weight": (
        lambda f: edited(f / "c/0/6", lambda r: r["members"][0].update(weight=2.0)),
        "c/0/6",
    ),
    "a period": (
        lambda f: edited(f / "c/0/6", lambda r: r["members"][0].update(period=2.0)),
        "c/0/6 ",
    ),
    "tokens": (
        lambda f: edited(f / "c/0/6", lambda r: r["members"][1].update(tokens=33)),
        "s/0/6|u/0/b.1.6",
    ),
    "the chain": (lambda f: edited(f / "c/0/2", lambda r: r.update(nonce="9")), "c/0/3"),
    "a snapshot": (lambda f: flipped(f / "s/0/6"), "s/0/6"),
    "a short snapshot": (lambda f: shortened(f / "s/0/6"), "s/0/6"),
    "a ledger": (lambda f: edited(f / "s/0/6", lambda s: s.update(tokens=1)), "s/0/6"),
    "no snapshot": (lambda f: [p.unlink() for p in f.glob("s/1/*")], "s/1/"),
    "a newer format": (
        lambda f: (f / "c/0/6").write_bytes(b"maxdiloco-islands 9 record\n{}\n"),
        "c/0/6 .*format 9",
    ),
    "a run": (
        lambda f: edited(f / "run.json", lambda run: run.update(wire="int9")),
        "run.json: wire=int9",
    ),
    "a large object": (
        lambda f: (f / "run.json").write_bytes(b"x" * (2 << 20)),
        "run.json .*2097152",
    ),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_audit_names_the_first_object_that_differs(what, folder, capsys):
    damage, named = DAMAGES[what]
    damage(folder)
    assert main(["audit", str(folder)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(named, line), line


@pytest.mark.parametrize("at", ["u/0/b.1.6", "g/0/5", "c/0/6"])
def test_what_a_run_deletes_beside_an_audit_is_no_difference(at, written, folder):
    """As a next snapshot does, while an object is read: the audit and the status begin again."""
    going = []

    class Folder(store.LocalFolder):
        def get_first(self, name, most):
            if name.startswith(at) and not going:
                going.append(name)
                names = [entry.name for kind in "ug" for entry in self.list_all(f"{kind}/0")]
                self.delete([*names, "s/0/4"])
            return super().get_first(name, most)

    good, run = store.local_folder(folder), written[1]
    whole = audit.replay(good, run, 0)
    found = audit.replay(Folder(folder), run, 0)
    assert going and found.records == whole.records
    assert (
        found.state.watermarks == whole.state.watermarks
        and found.state.tokens == whole.state.tokens
    )
    assert (whole.computed, found.computed) == (2, 0)
    good.delete(["s/0/6"])
    with pytest.raises(records.Damaged, match="^s/0/: "):
        audit.replay(good, run, 0)


def test_the_ledger_knows_a_token_that_was_not_read(written):
    folder, run, _ = written
    log = audit.replay(store.local_folder(folder), run, 0)
    assert audit.account(log.records, log.messages) == ""
    key, message = max(log.messages.items())
    wrong = {**log.messages, key: message._replace(read=message.read + 1)}
    assert audit.account(log.records, wrong).startswith("u/0/b.1.6 ")


def test_status_tells_an_island_that_has_ended_from_a_silent_one(folder, capsys):
    """b has left, and ended with the run once its tokens are committed."""
    bucket = store.local_folder(folder)
    beat, _ = records.decode("hb/b", bucket.get("hb/b"))
    bucket.put("hb/b", records.encode(beat._replace(count=99, left=True)))

    def states():
        assert main(["status", str(folder), "wait=0.01"]) == 0
        return [line.split()[2] for line in capsys.readouterr().out.splitlines()[1:3]]

    assert states() == ["silent", "left"]
    run, _ = records.decode("run.json", bucket.get("run.json"))
    bucket.put("run.json", records.encode(run._replace(tokens=1)))
    assert states() == ["silent", "ended"]


def test_status_says_who_is_there(folder, capsys):
    assert main(["status", f"file://{folder}", "wait=0.01"]) == 0
    head, a, b, zero, one = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["island", "incarnation", "is"]
    assert a.split() == ["a", "1", "silent", "0", "192", "0", "0"]
    assert re.findall(r"\d+", zero)[:3] == ["0", "6", "384"]


def test_status_sees_a_living_island(folder, capsys, monkeypatch):
    bucket = store.local_folder(folder)
    beat = records.encode(records.Heartbeat("a", 1, 10**6, (1, 1), 12.0, False))
    monkeypatch.setattr("time.sleep", lambda seconds: bucket.put("hb/a", beat))
    assert main(["status", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[2:4] == ["trains", "12"]


def test_check_of_a_folder_and_of_one_without_conditions(tmp_path, capsys, monkeypatch):
    (tmp_path / "new").mkdir()
    assert main(["check", str(tmp_path / "new")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert re.findall(r"\d+", out[0]) == ["40", "8", "40"], "races, writers, with one winner"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []

    class Overwrites(store.Bucket):
        def put_if(self, name, data, version):
            self.put(name, data)
            return {}

    good = store.in_memory()
    bucket = Overwrites(good._client, good._api)
    monkeypatch.setattr(log_store, "open_bucket", lambda url: bucket)
    assert main(["check", "s3://memory"]) == 1
    said = capsys.readouterr()
    assert " 8 " in said.err.splitlines()[0] and "s3://memory" in said.out.splitlines()[-1]


def test_check_finds_late_listings_and_stale_reads():
    old = {}

    class Late(store.Bucket):
        def list_all(self, prefix):
            return iter(list(super().list_all(prefix))[1:])

        def put(self, name, data):
            old.setdefault(name, data)
            super().put(name, data)

        def get(self, name):
            return old.get(name, super().get(name))

    good = store.in_memory()
    wrong = store_check.check(Late(good._client, good._api), print)
    assert len(wrong) == 2 and " 7 " in wrong[1]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["replay", "x"], "replay"),
        (["audit"], "URL"),
        (["audit", "{none}"], "URL={none} "),
        (["status", "file://{none}"], "URL=file://{none} "),
        (["check", "{none}"], "URL={none} "),
        (["status", "{empty}"], "URL={empty} "),
        (["audit", "hdfs://a/b"], "URL=hdfs://a/b "),
        (["audit", "{empty}", "wait=1"], "wait=1 "),
        (["check", "gs://"], "URL=gs:// "),
        (["check", "{file}/a"], "URL={file}/a "),
        (["status", "{empty}", "wait=-1"], "wait=-1"),
    ],
)
def test_bad_input_is_named_with_exit_code_2(arguments, named, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    places = {name: tmp_path / name for name in ("none", "empty", "file")}
    assert main([argument.format(**places) for argument in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named.format(**places) in line
    assert not (tmp_path / "none").exists()


def test_islands_in_a_local_folder_need_no_package_for_buckets(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "obstore", None)
    in_lockstep(log_store.open_bucket(str(tmp_path)), a_run(islands_min=2), "ab", 12)
    for command in ("check", "audit", "status"):
        wait = ["wait=0.01"] * (command == "status")
        assert main([command, str(tmp_path), *wait]) == 0, capsys.readouterr().err
    assert not list(tmp_path.rglob("*.part"))


def test_a_bucket_without_its_package_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert main(["check", "s3://bucket/a"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "URL=s3://bucket/a " in line and "obstore" in line
