"""Stand-ins until the real classes are merged."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Any
from dpex import tuning
from dpex.protocol.binding import Binding

@dataclass(slots=True)
class Ask:
    place: int; made: int; unchanged: Any; early: bool
class NextChunk: ...
@dataclass(slots=True)
class Open:
    assigned: Any
class NextBatch: ...
@dataclass(slots=True)
class Send:
    finished: Any
@dataclass(slots=True)
class Finished:
    place: int
NEXT_CHUNK, NEXT_BATCH = NextChunk(), NextBatch()

class WorkerLoop:
    def __init__(self):
        self.place = self.made = 0
        self.asked = False
        self.made_then = None
        self.unchanged = None
    def ask(self, coming, early=False):
        if self.asked: return None
        self.asked = True
        self.made_then = self.made + coming if early else None
        u, self.unchanged = self.unchanged, None
        return Ask(self.place, self.made + coming, u, early)
    def ask_early(self):
        return self.ask(1, True)
    def last(self):
        if self.made_then is None or self.made < self.made_then: return None
        self.made_then = None
        return self.place
    def run(self, now):
        while True:
            if (a := self.ask(0)): yield a
            assigned = yield NEXT_CHUNK
            self.asked = False
            if assigned is None: return
            self.place = assigned.place + 1
            self.made += assigned.skipped_blocks
            chunk = yield Open(assigned)
            if chunk is not None:
                remaining = len(chunk.batches)
                long_s = 0.0 if assigned.again else tuning.PATIENT_S if chunk.patient else tuning.BLOCK_S
                gathered = 0.0
                while True:
                    facts = yield NEXT_BATCH
                    if facts is None: break
                    seconds, ended = facts
                    remaining -= 1
                    gathered += seconds
                    last = ended or remaining == 0
                    if last or gathered >= long_s:
                        if last and (a := self.ask(1)): yield a
                        self.made += 1
                        gathered = 0.0
                        yield Send(self.last())
                    if last:
                        pass
            if self.made_then is not None:
                self.made_then = None
                yield Finished(self.place)


# --- delivery
import dataclasses
from dpex.protocol.in_flight import Attempt, InFlight
from dpex.protocol.loss_causes import Loss, LossCause, joined
from dpex.protocol.recovery import Resend, recover
from dpex.protocol.chunks import Entry

@dataclass(slots=True)
class Wait:
    seconds: float
@dataclass(slots=True)
class Pause:
    seconds: float

class Delivery:
    def __init__(self, run, order, planner, carrier, in_order):
        self.run, self.order, self.planner, self.carrier, self.in_order = run, order, planner, carrier, in_order
        self.in_flight = InFlight()
        self.undelivered = {}
        self.unsent = []
        carrier.open(run)
    def fill(self):
        self.order.fill(self.unsent.append)
        self.flush()
    def flush(self):
        if self.unsent:
            chunks, self.unsent = self.unsent, []
            self.send(Resend(chunks, Attempt()))
    def send(self, message):
        chunks = self.in_flight.numbered(message.chunks, self.run)
        self.carrier.feed(chunks, alone=message.attempt.alone, resent=message.attempt != Attempt(),
            parallel=self.planner.parallel, starting=self.planner.free_cores,
            one_by_one=message.attempt.one_by_one or self.in_flight.one_by_one)
        self.in_flight.add(chunks, message.attempt)
    def prefetch(self):
        asked = self.order.prefetch_chunk(self.unsent.append, lambda: False)
        self.flush()
        return asked
    def next_entry(self):
        first = not self.order.delivered
        self.fill()
        entry = yield from self.wait()
        if entry is None: return None
        self.fill()
        for _ in range(0 if first else 2):
            if not self.prefetch(): break
        return entry
    def collect(self):
        losses = []
        while (news := self.carrier.take()) is not None:
            if isinstance(news, Loss): losses.append(news)
            elif news.part.run == self.run.key:
                new = self.in_flight.arrive(news.part.chunk, news.entries)
                for e in new or ():
                    if e.outcome == "end": self.order.end_stream(e.batch, e.state)
                    else: self.undelivered[e.batch] = e
                if new is not None:
                    self.planner.observe(batches=len(news.entries), seconds=news.seconds, cpu_seconds=news.seconds, size_bytes=len(news.entries) << 20)
        for cause in LossCause:
            of = [l for l in losses if l.cause is cause]
            lost = []
            for l in of:
                if l.part is not None and l.part.run == self.run.key:
                    s = self.in_flight.lose(l.part)
                    if s: lost.append(s)
            if lost:
                lost.sort(key=lambda s: min(s.missing))
                plan = recover(lost, cause, joined(of))
                if any(m.attempt.lost_blocks == tuning.MOST_LOSSES for m in plan.resends):
                    raise RuntimeError("lost too often")
                if plan.wait_s: yield Pause(plan.wait_s)
                for b in plan.ended:
                    self.order.end_stream(b); self.in_flight.end_stream(b, self.run.num_workers)
                for b, error in plan.failed:
                    self.undelivered[b] = Entry(b, error, "error")
                for m in plan.resends:
                    if m.chunks: self.send(m)
    def wait(self):
        while True:
            yield from self.collect()
            b = self.order.choose(self.undelivered, in_order=self.in_order)
            if b is not None:
                e = self.undelivered.pop(b); self.order.deliver(e); return e
            if not self.in_flight: self.fill()
            if self.order.next_batch is None:
                self.carrier.end(); self.order.finish(); return None
            if self.in_flight and self.carrier.ended:
                lost = self.in_flight.take()
                self.carrier.end()
                self.run = dataclasses.replace(self.run, key=self.run.key + "'")
                self.carrier.open(self.run)
                for a in dict.fromkeys(s.attempt for s in lost):
                    self.send(Resend([c for s in lost if s.attempt == a for c in s.rest()], a))
            yield Wait(5.0)
