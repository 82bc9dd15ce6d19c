"""How many batches a chunk has, and how many may be in flight.

A chunk costs some milliseconds beside its work, so it is about a second of work, and more where so
many tasks run at once that handing chunks to them would keep a core busy.
The first chunk of an iteration is a single batch, which then waits for nothing but itself, and
the next ones are short. Towards the end chunks shrink, so that no task works on while the others
have finished.
"""

from __future__ import annotations

import math

__all__ = ["ChunkPlanner"]

_CHUNK_SECONDS = 1.0
_MOST_CHUNK_SECONDS = 5.0
_CHUNKS_PER_SECOND = 20
_CHUNK_BYTES = 256 << 20
# From one round of chunks to the next, one for each logical worker, they grow by this factor.
_GROWTH = 4
# Of each logical worker: a chunk at work, one that waits for it, and one that is being drawn.
_CHUNKS_IN_WINDOW = 3
# Where fewer tasks than logical workers are at work, chunks are shorter, down to this share.
_LEAST_CHUNK_SHARE = 0.1
# Multiples of it, less their whole parts, lie evenly in [0, 1), however many there are.
_GOLDEN_SHARE = (math.sqrt(5) - 1) / 2
# However small a batch is: indices are drawn and kept for every one that is in flight.
_MAX_WINDOW = 1024
# A worker that spends less than this share of its time computing waits for something.
_SMALLEST_SHARE = 1 / 64


class ChunkPlanner:
    """Sizes chunks and the run-ahead from what batches turned out to cost.

    Args:
        num_workers: Cap on the number of parallel tasks.
        prefetch_factor: Batches per worker that may always be in flight.
        prefetch_bytes: Bytes that may be in flight beyond that.
        claims_cpus: Whether Ray itself runs no more tasks than there are CPUs, so that all
            workers' tasks can be left to it once the first ones are warm.

    Attributes:
        free_cores: Processors for the tasks to begin with.
        chunks_issued: Chunks sent in this iteration.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        prefetch_factor: int,
        prefetch_bytes: int,
        claims_cpus: bool = False,
    ) -> None:
        self._num_workers = num_workers
        self._guaranteed = max(1, num_workers * prefetch_factor)
        self._prefetch_bytes = prefetch_bytes
        self.free_cores = 1
        self._claims_cpus = claims_cpus
        self._batch_seconds = 0.0
        self._batch_bytes = 0.0
        self._share = 1.0
        self._observed = False
        self.chunks_issued = 0

    def begin(self, *, free_cores: int) -> None:
        """Start an iteration: what is known of costs stays, the chunks begin small again.

        Args:
            free_cores: Processors for the tasks to begin with.
        """
        self.free_cores = max(1, free_cores)
        self.chunks_issued = 0

    def observe(self, *, batches: int, seconds: float, cpu_seconds: float, size_bytes: int) -> None:
        """Take the cost of some finished batches into account."""
        if batches == 0:
            return
        share = min(1.0, max(_SMALLEST_SHARE, cpu_seconds / max(seconds, 1e-9)))
        weight = 0.25 if self._observed else 1.0
        self._batch_seconds += weight * (seconds / batches - self._batch_seconds)
        self._batch_bytes += weight * (size_bytes / batches - self._batch_bytes)
        self._share += weight * (share - self._share)
        self._observed = True

    @property
    def batch_s(self) -> float:
        """What a batch takes to make, in seconds, as far as is known."""
        return self._batch_seconds

    @property
    def parallel(self) -> int:
        """Tasks to run at once: one per free core; once warm, more if they wait or Ray counts."""
        if not self._observed:
            return min(self._num_workers, self.free_cores)
        if self._claims_cpus:
            return self._num_workers
        return min(self._num_workers, math.ceil(self.free_cores / self._share))

    @property
    def guaranteed(self) -> int:
        """Batches that may always be in flight: torch's run-ahead."""
        return self._guaranteed

    @property
    def window(self) -> int:
        """Batches that may be drawn and not yet delivered."""
        if not self._observed:
            return self._guaranteed
        affordable = int(self._prefetch_bytes / max(1.0, self._batch_bytes))
        return max(self._guaranteed, min(_MAX_WINDOW, affordable))

    def size(self, *, remaining: int | None) -> int:
        """Return how many batches the next chunk should take.

        Args:
            remaining: Batches that the sampler has left, where it says so.
        """
        parallel, workers = self.parallel, self._num_workers
        # Tasks of the same length would end, and have to be started, all at the same time.
        spread = self.chunks_issued * _GOLDEN_SHARE % 1.0
        grown = _GROWTH ** min(10, self.chunks_issued // workers)
        sizes = [self.window // (_CHUNKS_IN_WINDOW * workers)]
        if not self._observed:
            sizes.append(1)  # samples may wait for those of other logical workers
        else:
            sizes.append(int(grown * (1 + (_GROWTH - 1) * spread)))
            seconds = max(_CHUNK_SECONDS, min(_MOST_CHUNK_SECONDS, parallel / _CHUNKS_PER_SECOND))
            # A round of chunks, one for each logical worker, is not to take the fewer tasks longer.
            seconds *= max(_LEAST_CHUNK_SHARE, parallel / workers)
            sizes.append(round((0.75 + 0.5 * spread) * seconds / max(self._batch_seconds, 1e-6)))
            sizes.append(int(_CHUNK_BYTES / max(1.0, self._batch_bytes)))
        if remaining is not None:
            sizes.append(math.ceil(remaining / workers))
        return max(1, min(sizes))

    @property
    def settled(self) -> bool:
        """Whether every logical worker has had its first chunk in this iteration."""
        return self._observed and self.chunks_issued >= self._num_workers

    def issued(self) -> None:
        """Count one chunk as sent."""
        self.chunks_issued += 1
