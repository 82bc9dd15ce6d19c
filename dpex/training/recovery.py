"""Recovery of lost chunks: which batches to resend, and which batches fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dpex import tuning
from dpex.errors import BatchLostError
from dpex.training.in_flight import ChunkInFlight, joined_streams, lost_error
from dpex.wire.loss_causes import Loss, LossCause, joined
from dpex.worker.map_style import Chunk

__all__ = ["Recovery", "Resend", "recover"]


@dataclass(frozen=True)
class Resend:
    """Chunks to send in one message.

    Attributes:
        chunks: The chunks, without their numbers.
        alone: Whether each gets a task that makes no other chunk.
        tries: How often each was sent alone, this time included.
        one_by_one: Whether only one task may run at a time.
    """

    chunks: list[Chunk]
    alone: bool
    tries: int = 1
    one_by_one: bool = False


@dataclass
class Recovery:
    """The answer to a loss.

    Invariant: every batch that was missing is in exactly one of ``resends`` and ``failed``, or its
    stream is in ``ended``.

    Attributes:
        resends: Messages to send, in this order.
        failed: Batches that become an error, each with the error.
        ended: Streams that end with their failed batch, each as the number of its next batch.
        blocks_only: Whether finished blocks were lost, and no worker process died over a batch.
        reason: The reasons that the pipeline reports.
        wait_s: Seconds to wait before the first message.
    """

    resends: list[Resend] = field(default_factory=list)
    failed: list[tuple[int, BatchLostError]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    blocks_only: bool = False
    reason: str = ""
    wait_s: float = 0.0

    @property
    def retries(self) -> int:
        """Number of batches that are resent because of this loss."""
        return sum(len(chunk.batches) for message in self.resends for chunk in message.chunks)


def recover(lost: Sequence[ChunkInFlight], losses: Sequence[Loss]) -> Recovery:
    """Decide about lost chunks.

    A task makes many batches, so dpex cannot know which batch killed it. It resends each batch to a
    task that makes no other batch. A batch that is lost again fails. A stream's batches stay
    together and get more tries. If only blocks were lost, the chunks are resent as they were.

    Args:
        lost: The chunks that were in flight.
        losses: What the pipeline reports about them.
    """
    causes = {loss.cause for loss in losses}
    if causes == {LossCause.BLOCK}:
        return Recovery(
            resends=[Resend(list(s.rest()), s.alone, s.tries) for s in joined_streams(lost)],
            blocks_only=True,
        )
    found = Recovery(reason=joined(losses) or "no reason known")
    store_full = LossCause.STORE_FULL in causes
    if store_full:
        # All finished blocks have been read, so Ray soon frees them. Then a single block fits where
        # several blocks did not.
        found.wait_s = tuning.STORE_FULL_WAIT_S
    most_tries = tuning.STORE_FULL_TRIES if store_full else tuning.STREAM_TRIES
    single: list[Chunk] = []
    for sent in joined_streams(lost):
        if not sent.alone:
            single.extend(sent.rest(most=1))
        elif (sent.chunk.stream or store_full) and sent.tries < most_tries:
            # A batch of another stream may have killed the process.
            found.resends.append(Resend(list(sent.rest()), True, sent.tries + 1, store_full))
        else:
            failed = sent.missing
            if sent.chunk.stream:  # the error of the first lost batch ends the stream
                failed = {min(failed)}
                found.ended.append(min(failed) + sent.chunk.stride)
            found.failed += [
                (b, lost_error(sent.chunk, b, found.reason, store_full=store_full)) for b in failed
            ]
    if single:
        found.resends.insert(0, Resend(single, True, one_by_one=store_full))
    return found
