"""The store of simulator.py: requests that are late, lost, unanswered, refused or done twice."""

from math import log
from typing import NamedTuple

from benchmarks.simulated_islands import MemoryStore
from maxdiloco.islands import log_store, outer_step, records, rules, state_machine


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


class Store(MemoryStore):
    """The store and its faults. payloads: {name: number}."""

    def __init__(self):
        super().__init__()
        self.payloads, self.corrupt, self.away_until = {}, set(), 0.0

    def request(self, program, action):
        """Let a request reach the store later, or not, and the answer come later still."""

        def reach():
            faults, random, result = self.faults, self.random, state_machine.FAILED
            lost = faults.lost and random() < faults.lost
            lost = lost or (faults.refused and random() < faults.refused)
            if self.now >= self.away_until and not lost:
                result = self.carry_out(program, action)
                if faults.twice and random() < faults.twice:
                    result = self.carry_out(program, action)
                if faults.unanswered and random() < faults.unanswered:
                    result = state_machine.FAILED
            self.later(self.latency(), program, state_machine.Answer(action, result))

        self.later(self.latency(), program, reach)

    def latency(self):
        slow, late = self.faults.slow, -log(1.0 - self.random()) / 20
        return late + self.rng.choice((1.0, 5.0)) if slow and self.random() < slow else late

    def carry_out(self, program, action):
        match action:
            case state_machine.Create(name, body):
                return self.create(program, name, body)
            case state_machine.Reduce(draft):
                return self.reduce(draft)
            case state_machine.FetchGradient(record):
                if any(
                    name not in self.payloads for name in log_store.sources_of(self.run, record)
                ):
                    return None
                name = records.gradient_name(record)
                stored = outer_step.has_gradient(self.run, record)
                program.gradients[record] = self.payloads[name] if stored else self.mean(record)
                return True
            case state_machine.Delete(fragment):
                return self.delete_old(fragment)
        found = self.answer(action, self.now)
        if isinstance(action, state_machine.LoadSnapshot) and found is not None:
            value = program.values[found.fragment]
            name = records.snapshot_name(found.fragment, found.number)
            value.theta, value.trace = self.payloads[name]
        return found

    def create(self, program, name, body):
        if name in self.objects:
            return state_machine.EXISTS
        records.encode(body)  # raises for what no reader accepts
        if name[0] == "c":
            self.check_record(body)
        chance = self.faults.late_listing
        late = self.rng.choice((1.0, 8.0)) if chance and self.random() < chance else 0.0
        self.put(name, body, listed_from=self.now + late)
        payload = program.payloads.get(name)
        if payload is not None:
            self.payloads[name] = payload
            chance = self.faults.corrupt
            if name[0] == "u" and chance and self.random() < chance:
                self.corrupt.add((body.fragment, *rules.message_key(body)))
        return state_machine.CREATED

    def reduce(self, draft):
        names = [records.message_name(draft.fragment, *rules.message_key(m)) for m in draft.members]
        if any(name not in self.payloads for name in names):
            return state_machine.FAILED  # deleted: the record is there already
        bad = [rules.message_key(m) for m in draft.members
               if (draft.fragment, *rules.message_key(m)) in self.corrupt]  # fmt: skip
        if bad:
            return state_machine.Reduced("", tuple((key, "sha256") for key in bad))
        name = records.gradient_name(draft)
        if outer_step.has_gradient(self.run, draft):
            self.payloads[name] = self.mean(draft)
            self.put(name, True)
        return state_machine.Reduced(name)

    def mean(self, record):
        total = weights = 0.0
        for member in record.members:
            name = records.message_name(record.fragment, *rules.message_key(member))
            total += member.weight * self.payloads[name]
        for weight in {(m.island, m.incarnation): m.weight for m in record.members}.values():
            weights += weight
        return round(64 * total / weights) / 64

    def delete_old(self, fragment):
        folders = [f"{kind}/{fragment}/" for kind in "ugcs"] + ["d/"] * (fragment == 0)
        names = [name for folder in folders for name in self.listed(folder, self.now)]
        snapshots = [self.objects[n] for n in names if n[0] == "s"]
        for name in rules.deletable(names, snapshots):
            self.delete(name)
            self.payloads.pop(name, None)
        if fragment == 0:
            self.check_leases(snapshots)
        return True
