"""Islands under a seeded scheduler, over a store that goes wrong; what may never happen.

A program is state_machine.py with numbers of one value a fragment. An event is the end of an inner
step, a tick or an answer. Everything random follows from the seed. `Broken` says what was violated.
schedules.py runs many.
"""

import itertools
import random
import re
from collections import Counter
from heapq import heappop, heappush

from simulated_program import TIMING, Program, settings
from simulated_store import Faults, Store

from maxdiloco.islands import audit, log_store, records, rules
from maxdiloco.islands.state_machine import (
    TRAIN,
    Answer,
    Apply,
    Begin,
    Evaluate,
    Pack,
    Say,
    StepDone,
    Stop,
    Tick,
)

TICK = 0.5
CALM = 4000  # events in which the log has to grow once the store is back
WHOLE_S = 60.0  # in which islands that train have the global batch together


class Broken(AssertionError):
    """An invariant does not hold."""


def require(true, *what):
    if not true:
        raise Broken(" ".join(map(str, what)))


class World(Store):
    """The programs over their store, and what was seen of them."""

    def __init__(self, seed, names=None, step_tokens=(1, 2, 3), **changes):
        """names, step_tokens, changes: of other islands, steps and keys of the run."""
        super().__init__()
        rng = random.Random(seed)
        self.names = ["a", "b", "c", "d"][: rng.choice((1, 2, 2, 3, 3, 4))]
        self.names = self.names if names is None else list(names)
        batch = random.Random(f"{seed} global batch")
        batch = batch.choice((4, 5, 7, 16)) if batch.random() < 0.25 else 0
        self.run = settings(rng, self.names)._replace(**{"global_batch_size": batch} | changes)
        self.step_tokens = step_tokens
        automatic = random.Random(f"{seed} period").random() < 0.4
        self.timing = TIMING._replace(automatic=automatic)
        self.rng = random.Random(f"{seed} events")
        self.faults, self.random = Faults.drawn(self.rng), self.rng.random
        self.now, self.calm, self.programs = 0.0, False, []
        self.queue, self.count = [], itertools.count()
        self.decided, self.digests, self.ranges, self.seen = set(), {}, {}, Counter()
        self.tops = [0]  # the highest block in the records of fragment 0, after each
        self.marks, self.periods = {}, [0.0]  # as the log has them after each of its records
        self.known, self.members = set(), [()]  # names that are not dead, after each record
        self.tokens = {F: [0] for F, _ in enumerate(self.run.fragments)}
        for name in self.names:
            self.spawn(name, self.rng.random())

    def spawn(self, name, delay, earlier=None):
        """earlier: the program that joins again."""
        program = Program(self, name, 0.25 * self.rng.choice((1, 1, 2, 4, 8)), earlier)
        self.programs.append(program)
        self.later(delay, program, None)

    def later(self, delay, program, event):
        heappush(self.queue, (self.now + delay, next(self.count), program, event))

    # -- the scheduler -----------------------------------------------------------------------------

    def run_events(self, number):
        for _ in range(number):
            self.one_event()

    def one_event(self):
        self.now, _, program, event = heappop(self.queue)
        if callable(event):  # a request reaches the store
            event()
            return
        if not program.living:
            return
        if self.now < program.frozen_until and not self.calm:
            self.later(program.frozen_until - self.now, program, event)
            return
        faults = self.faults
        if faults.freeze and self.random() < faults.freeze:
            program.frozen_until = self.now + self.rng.choice((1.0, 4.0, 20.0))
        if faults.away and self.random() < faults.away:
            self.away_until = self.now + self.rng.choice((1.0, 5.0, 15.0))
        if faults.share and self.random() < faults.share:
            self.spawn(program.name, self.random())
        if event is None:
            self.later(TICK * (0.5 + self.random()), program, None)
            event = Tick(self.now)
        elif isinstance(event, StepDone):
            program.stepping = False
            for fragment, value in enumerate(program.values):
                size = program.moved(fragment)
                value.x, value.unsent = value.x + size, value.unsent - size
        if self.deliver(program, event) or isinstance(event, StepDone):
            self.check(program)
        if program.living and not program.stepping and program.state.may_step():
            program.stepping = True
            tokens = self.rng.choice(self.step_tokens)
            if self.run.global_batch_size:
                tokens = self.batch_size(program)
            self.later(program.step_time * (0.8 + 0.4 * self.random()), program, StepDone(tokens))

    def batch_size(self, program):
        return rules.batch_size(self.run, program.state.logs[0].state, program.name)

    def deliver(self, program, event):
        """Return whether the program's values may have changed."""
        die, changed = self.faults.die, isinstance(event, Answer) and type(event.action) in LOCAL
        for action in program.state.handle(event):
            if die and self.random() < die:
                self.end(program)
            if not program.living:
                return True
            own = LOCAL.get(type(action))
            if own is None:
                self.request(program, action)
            elif (answer := own(self, program, action)) is not None:
                changed = self.deliver(program, Answer(action, answer))
        return changed

    def end(self, program):
        program.living = False
        self.spawn(program.name, self.rng.choice((0.5, 3.0, 15.0)))

    # -- the numbers -------------------------------------------------------------------------------

    def pack(self, program, action):
        message = action.message
        value = program.values[message.fragment]
        exact = rules.unsent(value.theta, value.sent.values(), value.x)
        coded = round(64 * exact) / 64
        value.sent[message.seq] = coded
        value.unsent -= coded
        small = 1 / 128 + 1e-6 * (1 + abs(exact))
        require(abs(value.unsent) <= small, "a message is not what was not sent")
        name = records.message_name(message.fragment, *rules.message_key(message))
        program.payloads[name] = coded
        return message._replace(norm=abs(coded))

    def apply(self, program, action):
        record, how, committed, returned, keep = action
        F, value = record.fragment, program.values[record.fragment]
        before = value.theta
        value.outer_step(self.run, record, program.gradients.pop(record, None))
        key = program.name, program.state.incarnation
        own = {seq: value.sent.pop(seq) for seq in committed}
        for seq, coded in own.items():
            name = records.message_name(F, *key, seq)
            require(self.payloads.get(name, coded) == coded, name, "is not its own message")
        value.committed += sum(m.tokens for m in record.members if (m.island, m.incarnation) == key)
        for seq in returned:
            value.unsent += value.sent.pop(seq)
        if how == "merge":
            sent_at = max(
                o.t for o in program.state.logs[F].undecided if o.message.seq in committed
            )
            in_time = program.state.t == sent_at + self.run.overlap_steps and not value.sent
            require(in_time, "a merge that is late, or drops what is undecided")
            value.x = self.run.alpha * value.x + (1 - self.run.alpha) * value.theta
            value.unsent = value.theta - sum(value.sent.values()) - value.x
        elif how == "shift":
            value.x = rules.rebase(value.x, before, value.theta, own.values())
        if keep:
            name = records.snapshot_name(F, record.number)
            program.payloads[name] = (value.theta, value.trace)
        digest = value.digest()
        known = self.digests.setdefault((F, record.number), digest)
        require(known == digest, "digests differ after record", record.number)
        return digest

    def begin(self, program, action):
        program.joined = True
        for value in program.values:
            value.x, value.sent, value.unsent, value.committed = value.theta, {}, 0.0, 0

    def stop(self, program, action):
        program.living = False
        self.say(program, action)
        require("does not follow" not in action.line, action.line)
        if action.again or not any(other.living for other in self.programs):
            self.spawn(program.name, 0.5, program if action.again else None)

    def say(self, program, action):
        self.seen[re.sub(r"\w+/\S+|island \w+\.", "X", action.line)] += 1

    def evaluate(self, program, action):
        self.seen[action] += 1
        require(self.seen[action] == 1, "an evaluation is made twice")

    # -- what has to hold --------------------------------------------------------------------------

    def check_record(self, record):
        F, number = record.fragment, record.number
        require(number == len(self.tokens[F]), "a record is not the next")
        for name in log_store.sources_of(self.run, record) if record.members else ():
            require(name in self.payloads, "a record points at nothing")
        for one in (*record.members, *record.rejected):
            key = (F, *rules.message_key(one))
            require(key not in self.decided, key, "is in two records")
            self.decided.add(key)
        self.seen.update(reject.reason for reject in record.rejected)
        top = self.tops[-1]
        for member in record.members:
            key = rules.message_key(member)
            message = self.objects[records.message_name(F, *key)]
            require(0 <= number - 1 - message.base <= 2, key, "is too stale")
            require((F, *key) not in self.corrupt, key, "is damaged and counted")
            require(member.period == message.period, key, "has another period")
            size = self.run.block_tokens
            parts = [one for part in message.data for one in rules.ranges_by_block(part, size)]
            top = max([top, *(part.block for part in parts)])
            for part in parts if F == 0 else ():
                known = self.ranges.setdefault(part.block, [])
                self.seen["second lease"] += part.lease == 2
                apart = all(part.stop <= a or b <= part.start for a, b in known)
                require(apart, "tokens are counted twice of block", part.block)
                known.append((part.start, part.stop))
        self.tops += [top] if F == 0 else []
        if F == 0:
            self.marks |= {(m.island, m.incarnation): m.period for m in record.members}
            self.marks = {key: T for key, T in self.marks.items() if key not in record.dead}
            self.periods.append(max(self.marks.values(), default=0.0))
            decided = (*record.members, *record.rejected)
            self.known |= {(one.island, one.incarnation) for one in decided}
            self.known -= {*record.dead}
            self.members.append(sorted({name for name, _ in self.known}))
        self.tokens[F].append(self.tokens[F][-1] + sum(m.tokens for m in record.members))

    def check_leases(self, snapshots):
        """After a deletion few are left, however long the run: no block's that a record passed
        four snapshots before the second last one, but for those unfinished there."""
        old = sorted(snapshots, key=lambda state: state.number)[-2:][0]
        passed = self.tops[max(old.number - 4 * self.run.snapshot_every, 0)]
        leased = {records.number_of(name) for name in self.listed("d/", self.now)}
        left = {n for n in leased if n <= passed} - {one.block for one in old.blocks}
        require(not left, "leases stay:", sorted(left))
        self.seen["lease deleted"] += 0 < passed and 1 not in leased

    def check(self, program):
        s = program.state
        if s.phase != TRAIN or not program.living:
            return
        shared = self.periods[s.logs[0].state.number]
        if self.timing.automatic and shared:
            require(s.timing.period == shared, "a period is not the log's")
            require(TIMING.period / 60 <= shared <= rules.MAX_PERIOD, "a period has no limits")
            self.seen["period above the usual"] += shared > TIMING.period
            self.seen["period below the usual"] += shared < TIMING.period
        if total := self.run.global_batch_size:
            here = self.members[s.logs[0].state.number]
            sizes = [rules.batch_size(self.run, s.logs[0].state, name) for name in here]
            whole = max(total, len(here))  # an island has at least one sequence
            require(not here or sum(sizes) == whole, sizes, "is not the global batch", whole)
            require(not here or max(sizes) - min(sizes) <= 1, sizes, "is not even")
        for fragment, log in enumerate(s.logs):
            value, state = program.values[fragment], log.state
            require(state.tokens == self.tokens[fragment][state.number], "tokens are not replay")
            known = value.committed + log.tokens
            left = value.theta - value.unsent
            if log.undecided:
                known += sum([own.message.tokens for own in log.undecided])
                left -= sum(value.sent.values())
                require(len(log.undecided) <= 2, "more than two messages are undecided")
            require(s.tokens_read == known, "tokens read do not add up")
            require(abs(value.x - left) < 1e-6 * (1 + abs(left)), "x is not theta less its own")

    def heads(self):
        return [len(tokens) - 1 for tokens in self.tokens.values()]

    def check_growth(self):
        """No deadlock: with the store back all logs grow, by one survivor or with a newcomer."""
        self.calm, self.faults, self.away_until = True, Faults(), self.now
        living, newcomer = [p for p in self.programs if p.living], None
        for program in living:
            program.frozen_until = self.now
        absent = set(self.names) - {p.name for p in living}
        if self.run.islands_min == 1 and living and self.rng.random() < 0.5:
            for program in living[1:]:
                program.living = False
        elif absent:
            for name in sorted(absent):
                self.spawn(name, 0.1)
            newcomer = self.programs[-1]
        before = self.heads()
        for _ in range(CALM // 10):
            self.run_events(10)
            grown = all(b < now for b, now in zip(before, self.heads(), strict=True))
            if grown and (newcomer is None or newcomer.state.phase == TRAIN):
                return
        raise Broken(f"no growth: {before} -> {self.heads()}")

    def check_batch(self):
        """With the store back, the islands that train soon have the global batch together."""
        since = self.now  # when all islands have begun to train
        for _ in range(CALM if self.run.global_batch_size else 0):
            living = [program for program in self.programs if program.living]
            if any(program.state.phase != TRAIN for program in living):
                since = self.now
            elif sum(map(self.batch_size, living)) == self.run.global_batch_size:
                self.seen["whole batch"] += 1
                return
            self.run_events(10)
        # A newcomer whose requests take as long as a period catches up late, or never.
        require(self.now - since < WHOLE_S, "the global batch is not whole")

    def check_ledger(self):
        """Tokens read = committed + pending + rejected + unsent, or lost with a dead island."""
        for F in self.tokens:
            log = [self.objects[f"c/{F}/{n}"] for n in range(1, len(self.tokens[F]))]
            stored = [body for name, body in self.objects.items() if name.startswith(f"u/{F}/")]
            wrong = audit.account(log, {rules.message_key(m): m for m in stored})
            require(not wrong, wrong)
            found = Counter()
            for record in log:
                for member in record.members:
                    found[member.island, member.incarnation] += member.tokens
            require(sum(found.values()) == self.tokens[F][-1], "the ledger is not the log's")
            for message in stored:
                if (F, *rules.message_key(message)) not in self.decided:
                    found[message.island, message.incarnation] += message.tokens
            read = Counter()
            for program in self.programs:
                key = program.name, program.state.incarnation
                read[key] = max(read[key], program.joined * program.state.tokens_read)
            for key, tokens in read.items():
                require(tokens >= found[key], key, "has", tokens, "of", found[key])


LOCAL = {
    Pack: World.pack, Apply: World.apply, Begin: World.begin, Stop: World.stop,
    Say: World.say, Evaluate: World.evaluate,
}  # fmt: skip
