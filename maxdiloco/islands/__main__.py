"""Inspect the store of islands: `python -m maxdiloco.islands audit URL`, `status` and `check`."""

import os
import time
from collections.abc import Sequence
from types import MappingProxyType

from maxdiloco.command_line import HELP, Option, guarded, option_lines, read_options
from maxdiloco.errors import ConfigError
from maxdiloco.islands import audit, log_store, records, rules, store_check
from maxdiloco.islands.records import Damaged
from maxdiloco.output import aligned, say, say_error
from maxdiloco.storage import os_errors

USAGE = """usage: python -m maxdiloco.islands audit URL
       python -m maxdiloco.islands status URL [wait=5.0]
       python -m maxdiloco.islands check URL

URL: gs://, s3://, az:// or file:// with a folder, or a path. No command creates the folder.

audit: replay the log. The exit code is 1 at the first object that differs.
status: list the islands, the records, and how far each island is behind. An island has "left" if
its program exited before the run ended, and "ended" if it exited with the run. It is "silent" if it
sends no heartbeat. The exit code is 1 at the first damaged object.
check: test whether islands can use this store, with objects that it writes and deletes. The exit
code is 1 with a list of the failed tests.

examples:
  python -m maxdiloco.islands check s3://bucket/folder
  python -m maxdiloco.islands status runs/shared wait=10

options of status:"""
STATUS = MappingProxyType({
    "wait": Option(5.0, "seconds between the two reads of the heartbeats", float, 0),
})  # fmt: skip
FAILED = 1


@guarded
def main(argv: Sequence[str]) -> int:
    """Run the program, and return its exit code."""
    if not argv or argv[0] in HELP:
        say("\n".join([USAGE, *option_lines(STATUS)]))
        return 0
    command, *rest = argv
    if command not in ("audit", "check", "status"):
        raise ConfigError(f"{command} is not a command: expected audit, check or status.")
    if not rest or "=" in rest[0].partition("/")[0]:
        raise ConfigError(f"{command} needs the URL of a store. Write {command} URL.")
    url = rest[0]
    options, _ = read_options(rest[1:], STATUS if command == "status" else {}, command)
    path = os.path.expanduser(url.removeprefix("file://"))
    if "://" not in path and not os.path.isdir(path):
        remedy = "Create it first" if command == "check" else "Name the store of a run"
        raise ConfigError(f"URL={url} is not a folder. {remedy}.")
    bucket, remedy = log_store.open_bucket(url), "Repeat it when the store is back."
    with os_errors.replace_os_error(ConfigError, f"URL={url} cannot be used", remedy):
        if command == "check":
            return _check(bucket, url)
        try:
            run = audit.read_run(bucket)
            if run is None:
                raise ConfigError(f"URL={url} has no {records.RUN}. Name the store of a run.")
            return _audit(bucket, run) if command == "audit" else _status(bucket, run, options.wait)
        except Damaged as error:
            say_error(f"differs: {error}")
            return FAILED


def _check(bucket, url) -> int:
    wrong = store_check.check(bucket, say)
    for line in wrong:
        say_error(f"unfit: {line}")
    say(f"{url} is {'not ' if wrong else ''}fit for islands")
    return FAILED if wrong else 0


def _audit(bucket, run) -> int:
    logs = [audit.replay(bucket, run, fragment) for fragment in range(len(run.fragments))]
    say("\n".join(aligned(audit.lines(logs))))
    for fragment, log in enumerate(logs):
        say(
            f"fragment {fragment}: {len(log.records)} records, {log.computed} computed again, "
            f"{log.remade} of them from their members; {log.state.tokens:,} tokens; state "
            f"{log.state.digest[:12]}"
        )
    say("all digests, weights, rejects and tokens agree")
    return 0


def _status(bucket, run, wait: float) -> int:
    before = log_store.heartbeats(bucket, run, {})
    time.sleep(wait)
    now = log_store.heartbeats(bucket, run, {})
    logs = [audit.follow(bucket, run, fragment) for fragment in range(len(run.fragments))]
    rows = [["island", "incarnation", "is", "tokens/s", "tokens", "records behind"]]
    for name, beat in sorted(now.items()):
        living = before.get(name) != beat and not beat.left
        if beat.left:
            what = "ended" if rules.progress(run, logs[0][0]) >= 1 else "left"
        else:
            what = ("trains" if rules.is_ready(beat.sent) else "joins") if living else "silent"
        tokens = sum(m.tokens for m in logs[0][0].watermarks if m.island == name)
        speed = f"{beat.speed if living else 0:,.0f}"
        behind = (str(state.number - last[name]) if name in last else "all" for state, last in logs)
        rows.append([name, beat.incarnation, what, speed, f"{tokens:,}", " ".join(behind)])
    say("\n".join(aligned(rows)))
    for state, _ in logs:
        say(
            f"fragment {state.fragment}: {state.number} records, {state.tokens:,} tokens, "
            f"{100 * rules.progress(run, state):.1f} % of the run"
        )
    return 0


if __name__ == "__main__":
    main()
