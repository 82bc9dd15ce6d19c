"""The delivery of one epoch: requests ahead, batches in order, losses, recovery, new pipelines."""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Generic, NoReturn, Protocol, TypeVar

from dpex import tuning
from dpex.errors import BatchLostError, SerializationError, TooManySkippedError
from dpex.protocol.batch_order import BatchOrder
from dpex.protocol.chunks import Chunk, Entry, Run
from dpex.protocol.deferred_errors import KeptError
from dpex.protocol.loss_causes import Loss, LossCause, joined
from dpex.protocol.recovery import Recovery, Resend, recover
from dpex.protocol.sent_chunks import Attempt, SentChunks, described

__all__ = ["Arrived", "ArrivedBlock", "Carrier", "Delivery", "DeliveryState", "Pause", "Wait"]


class ArrivedBlock(Protocol):
    """The chunk that a block belongs to."""

    @property
    def run(self) -> str:
        """Key of the chunk's run."""

    @property
    def chunk(self) -> int:
        """Number of the chunk in its run."""


class Arrived(Protocol):
    """A block that has come, and its batches."""

    @property
    def block(self) -> ArrivedBlock:
        """The block."""

    @property
    def batches(self) -> Sequence[Entry]:
        """The batches of the block."""


ArrivedT = TypeVar("ArrivedT", bound=Arrived)


@dataclass(frozen=True)
class Wait:
    """A step of ``Delivery.next_entry``: wait until there is news.

    The driver sends back whether ``Carrier.has_news`` became true before the time passed. It may
    close the generator instead; nothing is lost then.

    Attributes:
        seconds: Maximum wait.
    """

    seconds: float


@dataclass(frozen=True)
class Pause:
    """A step of ``Delivery.next_entry``: let time pass, whatever comes.

    If the driver closes the generator instead, the epoch fails.

    Attributes:
        seconds: Length of the pause.
    """

    seconds: float


class Carrier(Protocol[ArrivedT]):
    """Carries chunks to worker processes, and their blocks back, in one run after another.

    Invariant: at most one run is open. Methods below ``end`` describe that run, or report to the
    user.
    """

    @property
    def alive(self) -> bool:
        """Whether runs can be opened: the loader is open, and its Ray is still there."""

    def open(self, run: Run) -> None:
        """Start a run, without waiting for it."""

    def wait_until_open(self) -> None:
        """Wait until the started run is open; called once, before the first ``send``."""

    def send(self, chunks: Sequence[Chunk], attempt: Attempt, *, one_by_one: bool) -> None:
        """Send chunks of the run.

        Args:
            chunks: The chunks.
            attempt: How they are sent.
            one_by_one: Whether only one task may run now.

        Raises:
            SerializationError: The chunks cannot be pickled, so none of them has been sent.
        """

    def end(self) -> None:
        """Cancel the run, if one is started or open."""

    def take(self) -> ArrivedT | Loss | None:
        """Return the next news, which may belong to an earlier run; None if there is none."""

    def has_news(self) -> bool:
        """Return whether news has come or the run has ended, and let other threads run."""

    @property
    def ended(self) -> bool:
        """Whether ``take`` can return nothing more of the run."""

    def lost_with_node(self) -> bool:
        """Return whether the run waits in vain because a node died; true once for each death."""

    def failure(self) -> BaseException | None:
        """Return the error that ended the run, or None."""

    @property
    def replaceable(self) -> bool:
        """Whether a new run can continue, after this run has ended."""

    def waiting_text(self) -> str:
        """Return a text that says why the next batch is late."""

    def name_dead_nodes(self) -> None:
        """Log which nodes have died."""

    def note_block(self, arrived: ArrivedT, *, new: bool) -> None:
        """Record a block of the run that has been taken in.

        Args:
            arrived: The block.
            new: Whether its chunk was in flight, so its costs count.
        """

    def note_late(self, waited_s: float) -> None:
        """Report that no batch has come for a while; raise if none can come."""

    def note_recovery(self, plan: Recovery) -> None:
        """Report that batches are resent."""

    def note_new_run(self, failure: BaseException | None, resent: int) -> None:
        """Report that a new run replaces a lost run.

        Args:
            failure: The error that ended the lost run, or None.
            resent: Number of batches that the new run makes again.
        """

    def leave_out(self, entry: Entry) -> None:
        """Report the samples that were left out of a batch; raise if they are too many."""


class DeliveryState(enum.Enum):
    """The state of the delivery of one epoch.

    Each arrow is a method of ``Delivery``::

                        fill                 end: the last batch, or a break
          OPENING ─────────────────> OPEN ──────────────────────────────────> ENDED
             ▲                        │ │                                       │
             └── _replace_run: lost ──┘ └──> FAILED <───── cancel ──────────────┘

    ``end`` and ``cancel`` may come in any state, and a failure stays.
    """

    OPENING = "a run has been started, and nothing waits for it yet"
    OPEN = "chunks are sent, and batches delivered"
    ENDED = "nothing more is delivered"
    FAILED = "every further call raises the same error"


class _Patience:
    """The times of one wait for a batch.

    Attributes:
        began: When the wait began.
        deadline: When it ends with an error; infinite without a timeout.
        note_at: When the user is told next.
        note_s: Time between that report and the one before.
    """

    def __init__(self, now: float, timeout_s: float) -> None:
        self.began = now
        self.deadline = now + (timeout_s or float("inf"))
        self.note_at, self.note_s = now + tuning.SLOW_WAIT_S, tuning.SLOW_WAIT_S


class Delivery(Generic[ArrivedT]):
    """The delivery of one epoch's batches.

    Invariant, at each ``Wait`` and between calls: every batch that ``order`` counts as in flight is
    in exactly one place. Its chunk is not complete (in ``order``) or not sent (``_unsent``). Or it
    is in flight (``_in_flight``), its loss has been reported (also ``_losses``), or it is ready
    (``_undelivered``). If an interrupt or an error comes elsewhere, the epoch fails.

    Args:
        run: The run that the batches belong to.
        order: Requests for the batches.
        carrier: Carries chunks and blocks.
        clock: Returns the time in seconds.
        in_order: Whether batches are delivered in order.
        timeout_s: Maximum wait for a batch in seconds; 0 for no maximum.

    Attributes:
        state: The state of the delivery.
    """

    def __init__(
        self,
        run: Run,
        order: BatchOrder,
        carrier: Carrier[ArrivedT],
        clock: Callable[[], float],
        *,
        in_order: bool,
        timeout_s: float,
    ) -> None:
        self._run = run
        self._order = order
        self._carrier = carrier
        self._clock = clock
        self._in_order = in_order
        self._timeout_s = timeout_s
        self._unsent: list[Chunk] = []
        self._flushed_at = self._drawn_since = 0.0
        self._in_flight = SentChunks()
        self._undelivered: dict[int, Entry] = {}
        self._runs_opened = 1
        self._runs_lost = 0
        self._losses: list[Loss] = []
        self._reason = ""
        self._failure: KeptError | None = None
        self.state = DeliveryState.OPENING
        carrier.open(run)

    @property
    def open(self) -> bool:
        """Whether batches can be delivered."""
        return self.state in (DeliveryState.OPENING, DeliveryState.OPEN)

    def raise_failure(self) -> None:
        """Raise the error that ended the epoch, if there was one."""
        if self._failure is not None:
            self._failure.reraise()

    # --- requests ---------------------------------------------------------------------------------

    def fill(self) -> None:
        """Draw and send as far ahead as torch does."""
        try:
            self._order.fill(self._take_chunk)
            if self._unsent or self.state is DeliveryState.OPENING:
                self._flush()
        except Exception:
            raise
        except BaseException:  # an interrupt, after which a batch may be missing
            self.cancel(None)
            raise

    def _prefetch_chunk(self, enough: Callable[[], bool]) -> bool:
        """Draw and send one chunk more than torch would, if costs allow it.

        Args:
            enough: As for ``BatchOrder.prefetch_chunk``.

        Returns:
            False if nothing more can be requested now.
        """
        self._drawn_since = self._clock()
        asked = self._order.prefetch_chunk(self._take_chunk, enough)
        if self._unsent:
            self._flush()
        return asked

    def _has_drawn_long(self) -> bool:
        return self._clock() >= self._drawn_since + tuning.DRAW_S

    def _take_chunk(self, chunk: Chunk) -> None:
        self._unsent.append(chunk)
        # Chunks share a message, but no chunk waits for others.
        if self._clock() - self._flushed_at > tuning.GATHER_S:
            self._flush()

    def _flush(self) -> None:
        """Send the chunks that have been drawn."""
        self._flushed_at = self._clock()
        chunks: list[Chunk] = []
        try:
            if self.state is DeliveryState.OPENING:
                self._carrier.wait_until_open()
                self.state = DeliveryState.OPEN
            chunks, self._unsent = self._unsent, []
            if chunks:
                self._send(Resend(chunks, Attempt()))
        except Exception as error:  # nothing else would make these batches
            failure = self.cancel(error)
            if chunks and not self._carrier.alive:
                raise failure from error
            raise

    def _send(self, message: Resend) -> None:
        """Send chunks in one message; an error of pickling replaces their batches."""
        chunks, attempt = self._in_flight.numbered(message.chunks, self._run), message.attempt
        one_by_one = attempt.one_by_one or self._in_flight.one_by_one
        try:
            self._carrier.send(chunks, attempt, one_by_one=one_by_one)
        except SerializationError as error:
            for chunk in chunks:
                for batch in chunk.numbers:
                    self._undelivered[batch] = Entry(batch, KeptError(error), "error")
            return
        self._in_flight.add(chunks, attempt)

    # --- delivery ---------------------------------------------------------------------------------

    def next_entry(self) -> Generator[Wait | Pause, bool, Entry | None]:
        """Return the next batch, or the error in its place, or None at the end of the epoch.

        Raises:
            RuntimeError: The next batch has not come within the timeout.
            TooManySkippedError: ``Carrier.leave_out`` raised it.
            BatchLostError: The pipeline stopped.
            Exception: The sampler, or the carrier, raised it.
        """
        # The loop waited for the first batch, so nothing delays that one.
        prefetched = tuning.CHUNKS_PER_STEP if self._order.delivered else 0
        patience: _Patience | None = None
        try:
            self.fill()
            while True:
                self._collect()
                if self._losses:
                    yield from self._recover()
                batch = self._order.choose(self._undelivered, in_order=self._in_order)
                if batch is None:
                    patience = patience or _Patience(self._clock(), self._timeout_s)
                    if not (yield from self._wait(patience)):
                        return None
                    continue
                entry = self._undelivered.pop(batch)
                self._order.deliver(entry)
                self.fill()
                for _ in range(prefetched):
                    if not self._prefetch_chunk(self._has_drawn_long):
                        break
                if entry.left_out:
                    self._leave_out(entry)
                if entry.outcome != "nothing":
                    return entry
                patience = None
        except (Exception, GeneratorExit):
            raise
        except BaseException:  # an interrupt, after which a batch may be missing
            self.cancel(None)
            raise

    def _leave_out(self, entry: Entry) -> None:
        try:
            self._carrier.leave_out(entry)
        except TooManySkippedError as error:
            self.end(error)
            raise

    def _wait(self, patience: _Patience) -> Generator[Wait, bool, bool]:
        """Wait until something has come or has been drawn; return False at the end of the epoch."""
        if not self._in_flight:
            self.fill()  # nothing else would bring the next batch
        if self._order.next_batch is None:
            self.end()
            self._order.finish()
            return False
        now = self._clock()
        if now >= patience.deadline:
            raise RuntimeError(f"{self._timeout_text()}. {self._carrier.waiting_text()}")
        wait_s = min(tuning.SLOW_WAIT_S, patience.deadline - now)
        if now >= patience.note_at:  # also if later batches arrive
            patience.note_s = min(2 * patience.note_s, tuning.MOST_NOTE_S)
            patience.note_at = now + patience.note_s
            self._carrier.note_late(now - patience.began)
        if self._in_flight and self._carrier.ended:
            self._replace_run()
        prompt_s = min(wait_s, tuning.PROMPT_S)
        if (yield Wait(prompt_s)):
            return True
        if self._prefetch_chunk(self._carrier.has_news):
            return True  # the wait is used to draw further ahead
        arrived = yield Wait(wait_s - prompt_s)
        if not arrived and self._carrier.lost_with_node():
            # It reports a node's death only once, so this loss need not count.
            self._replace_run(counts=False)
        return True

    def _timeout_text(self) -> str:
        at, batch = "", self._order.next_batch
        holder = self._in_flight.holding(batch)
        if holder is not None and batch is not None:
            at = f" waiting for batch {batch} ({described(holder.chunk, batch)})"
            if len(holder.missing) > 1:
                at += f"; its task is to make batches up to {max(holder.missing)}"
        return f"DataLoader timed out after {self._timeout_s} seconds{at}"

    def _collect(self) -> None:
        """Take in the blocks and losses that have come."""
        while (news := self._carrier.take()) is not None:
            if isinstance(news, Loss):
                self._losses.append(news)
            elif news.block.run == self._run.key:
                self._runs_lost, self._reason = 0, ""
                new = self._in_flight.arrive(news.block.chunk, news.batches)
                for entry in new or ():
                    if entry.outcome == "end":
                        self._order.end_stream(entry.batch, entry.state)
                    else:
                        self._undelivered[entry.batch] = entry
                self._carrier.note_block(news, new=new is not None)  # may raise a warning

    # --- recovery ---------------------------------------------------------------------------------

    @contextmanager
    def _or_fail(self) -> Iterator[None]:
        """Fail the epoch if an error, or the end of a pause, leaves batches in no place."""
        try:
            yield
        except Exception as error:
            if self.state is DeliveryState.FAILED:
                raise
            self._fail(error)
        except BaseException:
            self.cancel(None)
            raise

    def _recover(self) -> Generator[Pause, bool, None]:
        """Resend the batches that were lost, in their order; see ``recover``."""
        losses, self._losses = self._losses, []
        self._reason = joined(losses)
        with self._or_fail():
            for cause in LossCause:
                of_cause = [loss for loss in losses if loss.cause is cause]
                parts = [loss.part for loss in of_cause if loss.part is not None]
                found = [self._in_flight.lose(p) for p in parts if p.run == self._run.key]
                lost = [sent for sent in found if sent is not None]
                if lost:
                    lost.sort(key=lambda sent: min(sent.missing))
                    yield from self._resend(recover(lost, cause, joined(of_cause)))

    def _resend(self, plan: Recovery) -> Generator[Pause, bool, None]:
        self._carrier.name_dead_nodes()
        if any(message.attempt.lost_blocks == tuning.MOST_LOSSES for message in plan.resends):
            self._fail(None)
        self._carrier.note_recovery(plan)
        if plan.wait_s:
            yield Pause(plan.wait_s)
        for batch in plan.ended:
            self._order.end_stream(batch)
            self._in_flight.end_stream(batch, self._run.num_workers)
        for batch, error in plan.failed:
            self._undelivered[batch] = Entry(batch, KeptError(error), "error")
        for message in plan.resends:
            if message.chunks:
                self._send(message)

    def _replace_run(self, *, counts: bool = True) -> None:
        """Resend the batches in flight to a new run, because the old run was lost.

        Args:
            counts: Whether this loss counts among those in a row.

        Raises:
            BatchLostError: No run can continue. Or this is the third loss since a block arrived.
        """
        failure = self._carrier.failure()
        self._runs_lost += counts
        if (
            not (self._carrier.replaceable and self._carrier.alive)
            or self._runs_lost == tuning.MOST_LOSSES
        ):
            self._fail(failure)
        with self._or_fail():
            lost = self._in_flight.take()
            self._carrier.note_new_run(failure, sum(len(sent.missing) for sent in lost))
            self._carrier.end()
            self._runs_opened += 1
            key = f"{self._run.key.partition('-')[0]}-{self._runs_opened}"
            self._run = replace(self._run, key=key)
            self.state = DeliveryState.OPENING
            self._carrier.open(self._run)
            self._carrier.wait_until_open()
            self.state = DeliveryState.OPEN
            for attempt in dict.fromkeys(sent.attempt for sent in lost):
                chunks = [c for sent in lost if sent.attempt == attempt for c in sent.rest()]
                self._send(Resend(chunks, attempt))

    # --- end --------------------------------------------------------------------------------------

    def _fail(self, cause: BaseException | None) -> NoReturn:
        """Raise now, and at every further call, because the pipeline stopped in mid-epoch."""
        raise self.cancel(cause) from cause

    def cancel(self, cause: BaseException | None) -> BatchLostError:
        """End the epoch with an error, because batches are lost, and return the error."""
        where = (
            f"with {self._order.in_flight} batches outstanding; the next one is "
            f"{self._order.next_batch}"
        )
        if self._carrier.alive:
            reason = self._reason or str(cause or "no reason known")
            text = f"the workers ended {where}. The reason: {reason}"
        else:
            text = (
                f"the loader was closed, or Ray was shut down or lost, {where}. A new iter(loader) "
                "starts a new epoch"
            )
        error = BatchLostError(text)
        self.end(error)
        return error

    def end(self, failure: Exception | None = None) -> None:
        """End the epoch and its run, whose pipeline is then free for another run.

        Args:
            failure: The error that every further call raises, if there is one.
        """
        if self.state is not DeliveryState.FAILED:
            self.state = DeliveryState.ENDED if failure is None else DeliveryState.FAILED
            self._failure = None if failure is None else KeptError(failure)
        self._carrier.end()
