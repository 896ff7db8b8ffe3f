"""The store of simulator.py: requests that are late, lost, unanswered, refused or done twice."""

from collections import defaultdict
from math import log
from typing import NamedTuple

from maxdiloco.islands import records, rules, state_machine


class Faults(NamedTuple):
    """Probabilities of a request, or of an event."""

    lost: float = 0.0  # the request
    unanswered: float = 0.0
    twice: float = 0.0
    refused: float = 0.0  # 429, 503
    late_listing: float = 0.0
    slow: float = 0.0
    die: float = 0.0
    freeze: float = 0.0
    away: float = 0.0
    share: float = 0.0
    corrupt: float = 0.0
    diverge: float = 0.0

    @classmethod
    def drawn(cls, rng):
        """Most of them in a schedule are none, so that each has schedules of its own."""
        most = cls(0.1, 0.15, 0.1, 0.1, 0.5, 0.1, 0.004, 0.003, 0.002, 0.001, 0.05, 0.02)
        return cls(*(value * rng.random() if rng.random() < 0.4 else 0.0 for value in most))


class Store:
    """Objects and payloads. folders: of each, {name: the time from which a listing shows it}."""

    def __init__(self):
        self.objects, self.payloads, self.folders = {}, {}, defaultdict(dict)
        self.corrupt, self.away_until = set(), 0.0

    def request(self, program, action):
        """Let a request reach the store later, or not, and the answer come later still."""

        def reach():
            faults, random, result = self.faults, self.random, state_machine.FAILED
            lost = faults.lost and random() < faults.lost
            lost = lost or (faults.refused and random() < faults.refused)
            if self.now >= self.away_until and not lost:
                result = REQUESTS[type(action)](self, program, action)
                if faults.twice and random() < faults.twice:
                    result = REQUESTS[type(action)](self, program, action)
                if faults.unanswered and random() < faults.unanswered:
                    result = state_machine.FAILED
            self.later(self.latency(), program, state_machine.Answer(action, result))

        self.later(self.latency(), program, reach)

    def latency(self):
        slow, late = self.faults.slow, -log(1.0 - self.random()) / 20
        return late + self.rng.choice((1.0, 5.0)) if slow and self.random() < slow else late

    def create(self, program, action):
        name, body = action
        if name in self.objects:
            return state_machine.EXISTS
        records.encode(body)  # raises for what no reader accepts
        if name[0] == "c":
            self.check_record(body)
        self.objects[name] = body
        chance = self.faults.late_listing
        late = self.rng.choice((1.0, 8.0)) if chance and self.random() < chance else 0.0
        self.folder(name)[name] = self.now + late
        payload = program.payloads.get(name)
        if payload is not None:
            self.payloads[name] = payload
            chance = self.faults.corrupt
            if name[0] == "u" and chance and self.random() < chance:
                self.corrupt.add((body.fragment, *rules.message_key(body)))
        return state_machine.CREATED

    def put(self, program, action):
        self.objects[action.name] = action.body
        self.folder(action.name).setdefault(action.name, self.now)
        return True

    def get(self, program, action):
        return self.objects.get(action.name)

    def folder(self, name):
        return self.folders[name[: name.rfind("/") + 1]]

    def listed(self, folder):
        return [name for name, at in self.folders[folder].items() if at <= self.now]

    def list_heartbeats(self, program, action):
        return {name[3:]: self.objects[name] for name in self.listed("hb/")}

    def starts(self, program, action):
        names = self.listed(f"i/{action.island}/")
        return max((records.number_of(name) for name in names), default=0)

    def reduce(self, program, action):
        draft = action.draft
        names = [records.message_name(draft.fragment, *rules.message_key(m)) for m in draft.members]
        if any(name not in self.payloads for name in names):
            return state_machine.FAILED  # deleted: the record is there already
        bad = [rules.message_key(m) for m in draft.members
               if (draft.fragment, *rules.message_key(m)) in self.corrupt]  # fmt: skip
        if bad:
            return state_machine.Reduced("", tuple((key, "sha256") for key in bad))
        total = weights = 0.0
        for member, name in zip(draft.members, names, strict=True):
            total += member.weight * self.payloads[name]
        for weight in {(m.island, m.incarnation): m.weight for m in draft.members}.values():
            weights += weight
        name = records.gradient_name(draft)
        self.payloads[name] = round(64 * total / weights) / 64
        self.objects[name] = True
        self.folder(name)[name] = self.now
        return state_machine.Reduced(name)

    def fetch(self, program, action):
        found = self.payloads.get(records.gradient_name(action.record))
        program.gradients[action.record] = found
        return None if found is None else True

    def load(self, program, action):
        names = self.listed(f"s/{action.fragment}/")
        if not names:
            return None
        name = max(names, key=records.number_of)
        value = program.values[action.fragment]
        value.theta, value.trace = self.payloads[name]
        return self.objects[name]

    def delete(self, program, action):
        F = action.fragment
        folders = [f"{kind}/{F}/" for kind in "ugcs"] + ["d/"] * (F == 0)
        names = [name for folder in folders for name in self.listed(folder)]
        snapshots = [self.objects[n] for n in names if n[0] == "s"]
        for name in rules.deletable(names, snapshots):
            for table in (self.objects, self.payloads, self.folder(name)):
                table.pop(name, None)
        if F == 0:
            self.check_leases(snapshots)
        return True


REQUESTS = {
    state_machine.Create: Store.create,
    state_machine.PutHeartbeat: Store.put,
    state_machine.Get: Store.get,
    state_machine.GetMessage: Store.get,
    state_machine.ListHeartbeats: Store.list_heartbeats,
    state_machine.Reduce: Store.reduce,
    state_machine.FetchGradient: Store.fetch,
    state_machine.LoadSnapshot: Store.load,
    state_machine.Delete: Store.delete,
    state_machine.ListIncarnations: Store.starts,
}
