"""Number of batches in a chunk, and number of batches in flight.

Each chunk has an overhead of some milliseconds, so a chunk holds about one second of work. With
more than 20 tasks it holds up to five seconds, because handing out shorter chunks would keep a core
busy. The first chunk of an iteration is a single batch, so that no other batch delays it. The next
chunks are short. Towards the end of an epoch chunks shrink, so that no task works on after the
others have finished.
"""

from __future__ import annotations

import math

from dpex import tuning

__all__ = ["ChunkPlanner"]


class ChunkPlanner:
    """Planner of chunk sizes and of the number of batches in flight, from measured costs.

    Args:
        num_workers: Maximum number of parallel tasks.
        prefetch_factor: Number of batches per logical worker that may always be in flight.
        prefetch_bytes: Bytes of batches that may be in flight, if these are more batches than
            ``prefetch_factor`` allows.
        claims_cpus: Whether Ray itself runs no more tasks than there are CPUs. Then tasks for all
            logical workers may be submitted once costs are known.

    Attributes:
        free_cores: Number of free cores for the first tasks.
        chunks_sent: Number of chunks sent in this iteration.
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
        self.chunks_sent = 0

    def begin(self, *, free_cores: int) -> None:
        """Start an iteration: keep the measured costs, and start with small chunks.

        Args:
            free_cores: Number of free cores for the first tasks.
        """
        self.free_cores = max(1, free_cores)
        self.chunks_sent = 0

    def observe(self, *, batches: int, seconds: float, cpu_seconds: float, size_bytes: int) -> None:
        """Update the measured costs with some finished batches."""
        if batches == 0:
            return
        share = min(1.0, max(tuning.LEAST_CPU_SHARE, cpu_seconds / max(seconds, 1e-9)))
        weight = tuning.NEWEST_COST_SHARE if self._observed else 1.0
        self._batch_seconds += weight * (seconds / batches - self._batch_seconds)
        self._batch_bytes += weight * (size_bytes / batches - self._batch_bytes)
        self._share += weight * (share - self._share)
        self._observed = True

    @property
    def batch_s(self) -> float:
        """Estimated seconds to make a batch; 0 before the first measurement."""
        return self._batch_seconds

    @property
    def parallel(self) -> int:
        """Number of tasks to run at once.

        It is one per free core until costs are known. After that it is ``num_workers`` if Ray
        counts CPUs. Otherwise it is higher than one per core if tasks spend time waiting.
        """
        if not self._observed:
            return min(self._num_workers, self.free_cores)
        if self._claims_cpus:
            return self._num_workers
        return min(self._num_workers, math.ceil(self.free_cores / self._share))

    @property
    def guaranteed(self) -> int:
        """Number of batches that may always be in flight, as many as in torch."""
        return self._guaranteed

    @property
    def window(self) -> int:
        """Maximum number of batches that are drawn but not delivered."""
        if not self._observed:
            return self._guaranteed
        affordable = int(self._prefetch_bytes / max(1.0, self._batch_bytes))
        return max(self._guaranteed, min(tuning.MOST_IN_WINDOW, affordable))

    def size(self, *, remaining: int | None, open_chunks: int = 0) -> int:
        """Return the number of batches for the next chunk.

        Args:
            remaining: Number of batches that the sampler has left, or None if unknown.
            open_chunks: Number of chunks that have a size and are not sent.
        """
        parallel, workers = self.parallel, self._num_workers
        place = self.chunks_sent + open_chunks
        # Sizes vary. With equal sizes all tasks would end, and be replaced, at the same time.
        spread = place * tuning.GOLDEN_SHARE % 1.0
        grown = tuning.CHUNK_GROWTH ** min(10, place // workers)
        most = self.window // (tuning.CHUNKS_IN_WINDOW * workers)
        sizes = [math.ceil((1 - tuning.WINDOW_SPREAD_SHARE * (1 - spread)) * most)]
        if not self._observed:
            sizes.append(1)  # samples may wait for samples of other logical workers
        else:
            sizes.append(int(grown * (1 + (tuning.CHUNK_GROWTH - 1) * spread)))
            seconds = max(tuning.CHUNK_S, min(tuning.MOST_CHUNK_S, parallel / tuning.CHUNKS_PER_S))
            # Fewer tasks must not need more time for one chunk of every logical worker.
            seconds *= max(tuning.LEAST_CHUNK_SHARE, parallel / workers)
            varied = 1 - tuning.CHUNK_SPREAD_SHARE + 2 * tuning.CHUNK_SPREAD_SHARE * spread
            sizes.append(round(varied * seconds / max(self._batch_seconds, 1e-6)))
            sizes.append(int(tuning.CHUNK_BYTES / max(1.0, self._batch_bytes)))
        if remaining is not None:
            sizes.append(math.ceil(remaining / (tuning.CHUNKS_AT_END * workers)))
        return max(1, min(sizes))

    @property
    def past_first_chunks(self) -> bool:
        """Whether costs are known and every logical worker has had a chunk in this iteration."""
        return self._observed and self.chunks_sent >= self._num_workers

    def count_sent(self) -> None:
        """Count one chunk as sent."""
        self.chunks_sent += 1
