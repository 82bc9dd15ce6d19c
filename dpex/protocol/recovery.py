"""Recovery of lost chunks: which batches to resend, and which batches fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dpex import tuning
from dpex.errors import BatchLostError
from dpex.protocol.chunks import Chunk
from dpex.protocol.loss_causes import LossCause
from dpex.protocol.sent_chunks import Attempt, SentChunk, joined_streams, lost_error

__all__ = ["Recovery", "Resend", "recover"]


@dataclass(frozen=True)
class Resend:
    """Chunks to send in one message.

    Attributes:
        chunks: The chunks, without their numbers.
        attempt: How they are sent.
    """

    chunks: list[Chunk]
    attempt: Attempt


@dataclass
class Recovery:
    """The answer to a loss.

    Invariant: every batch that was missing is in exactly one of ``resends`` and ``failed``, or its
    stream is in ``ended``.

    Attributes:
        cause: The cause of the loss.
        reason: The reasons that the pipeline reports.
        resends: Messages to send, in this order.
        failed: Batches that become an error, each with the error.
        ended: Streams that end with their failed batch, each as the number of its next batch.
        wait_s: Seconds to wait before the first message.
    """

    cause: LossCause
    reason: str
    resends: list[Resend] = field(default_factory=list)
    failed: list[tuple[int, BatchLostError]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    wait_s: float = 0.0

    @property
    def retries(self) -> int:
        """Number of batches that are resent because of this loss."""
        return sum(len(chunk.batches) for message in self.resends for chunk in message.chunks)


def recover(lost: Sequence[SentChunk], cause: LossCause, reason: str) -> Recovery:
    """Decide about lost chunks.

    A task makes many batches, so dpex cannot know which batch killed it. It resends each batch to a
    task that makes no other batch. A batch that is lost again fails. A stream's batches stay
    together and get more tries. If only blocks were lost, the chunks are resent as they were.

    Args:
        lost: The chunks, whose missing batches are lost.
        cause: The cause of their losses.
        reason: The reasons that the pipeline reports.
    """
    found = Recovery(cause, reason)
    lost = joined_streams(lost)
    if cause is LossCause.BLOCK:
        for sent in lost:
            again = replace(sent.attempt, lost_blocks=sent.attempt.lost_blocks + 1)
            found.resends.append(Resend(list(sent.rest()), again))
        return found
    store_full = cause is LossCause.STORE_FULL
    if store_full:
        # The receiver reads the finished blocks, so Ray soon frees them. Then a single block fits
        # where several blocks did not.
        found.wait_s = tuning.STORE_FULL_WAIT_S
    most_tries = tuning.STORE_FULL_TRIES if store_full else tuning.STREAM_TRIES
    singles: dict[Attempt, list[Chunk]] = {}
    for sent in lost:
        attempt = sent.attempt
        if not attempt.alone:
            again = replace(attempt, alone=True, one_by_one=store_full)
            singles.setdefault(again, []).extend(sent.rest(most=1))
        elif (sent.chunk.stream or store_full) and attempt.tries < most_tries:
            # A batch of another stream may have killed the process.
            again = replace(attempt, tries=attempt.tries + 1, one_by_one=store_full)
            found.resends.append(Resend(list(sent.rest()), again))
        else:
            failed = sent.missing
            if sent.chunk.stream:  # the error of the first lost batch ends the stream
                failed = {min(failed)}
                found.ended.append(min(failed) + sent.chunk.stride)
            found.failed += [
                (b, lost_error(sent.chunk, b, found.reason, store_full=store_full)) for b in failed
            ]
    found.resends[:0] = [Resend(chunks, again) for again, chunks in singles.items()]
    return found
