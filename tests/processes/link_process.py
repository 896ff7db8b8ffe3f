"""One of several processes that exchange messages round after round: see test_links_processes.py.

Arguments: rank, count, rounds, timeout [s], a folder that all of them see.
"""

import os
import pathlib
import sys
import time
import zlib

from maxdiloco.errors import LostPeerError
from maxdiloco.processes import links

PAUSE_S = 0.02


def payload(rank, number):
    return bytes([rank, number % 256]) * (50_000 + 1000 * rank)


def run(made, rank, peers, rounds):
    """The checksum of all that came."""
    checksum = 0
    for number in range(rounds):
        for peer in peers:
            made.send(peer, ("round", number), [payload(rank, number)])
        for peer in peers:
            data = made.receive(peer, ("round", number), time.monotonic() + 60)
            checksum = zlib.crc32(data, checksum)
        print("round", number, flush=True)
        time.sleep(PAUSE_S)
    return checksum


def main():
    rank, count, rounds = map(int, sys.argv[1:4])
    folder = pathlib.Path(sys.argv[5])
    peers = [peer for peer in range(count) if peer != rank]

    def put(key, text):
        path = folder / key.replace("/", "-")
        path.with_suffix(".new").write_text(text)
        os.replace(path.with_suffix(".new"), path)

    def get(key):
        path = folder / key.replace("/", "-")
        while not path.exists():
            time.sleep(PAUSE_S)
        return path.read_text()

    listener = links.listen("127.0.0.1")
    addresses = links.exchange_addresses(rank, peers, listener.getsockname(), put=put, get=get)
    options = dict(secret=b"known to all of them", fingerprint="", timeout_s=float(sys.argv[4]))
    made = links.Links(rank, addresses, listener=listener, **options)
    try:
        made.meet()
        checksum = run(made, rank, peers, rounds)
    except LostPeerError as error:
        print(error, flush=True)
        made.close(1, why=str(error))
        sys.exit(error.exit_code)
    print("all told", made.close(60), "checksum", checksum, flush=True)


if __name__ == "__main__":
    main()
