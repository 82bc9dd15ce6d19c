"""The constants that tune dpex, by subject: each with its unit, its reason and its benchmark.

The suffix of a name is its unit: ``_S`` seconds, ``_PER_S`` a rate per second, ``_BYTES`` bytes,
``_SHARE`` a fraction of 1. A name without a suffix is a number of things, or a factor. "Benchmark"
names the ``make`` target that shows the effect of the constants below it. A time limit has no
benchmark: it must exceed what happens on a busy machine, and be short enough for a user who waits.

Some constants stay where dpex uses them: in ``datasets/`` and ``doctor/``.
"""

from __future__ import annotations

import math

# --- chunks, and the window of batches in flight --------------------------------------------------
# Benchmark: `bench-tiny` and `bench-null` for the overhead of a chunk, `bench-latency` for waits.

CHUNK_S = 1.0
"""Work in a chunk. Shorter chunks cost more messages; longer chunks delay the end of an epoch."""
MOST_CHUNK_S = 5.0
"""Work in a chunk if many tasks run, so that all of them together ask seldom enough."""
CHUNKS_PER_S = 20
"""Chunks that all tasks together finish in a second, above which chunks hold more work."""
CHUNK_BYTES = 256 << 20
"""Batches of a chunk; a lost process loses at most this much finished work."""
CHUNK_GROWTH = 4
"""Factor by which chunks grow each time that every logical worker has had one more chunk."""
CHUNKS_IN_WINDOW = 3
"""Chunks for each logical worker: one that a task makes, one that waits, and one being drawn."""
WINDOW_SPREAD_SHARE = 0.4
"""Share by which chunks that the window limits differ, so that tasks do not all ask at once."""
CHUNK_SPREAD_SHARE = 0.25
"""Share by which chunks are shorter or longer than their work says, for the same reason."""
NEWEST_COST_SHARE = 0.25
"""Weight of the newest block in the costs of a batch: one slow block changes them only in part."""
CHUNKS_AT_END = 2
"""Chunks for each logical worker that share the rest of an epoch, so that all tasks end together.

With one, some of 32 processes made 36 of 1,000 batches, and others 28.
"""
LEAST_CHUNK_SHARE = 0.1
"""Lower bound for the shortening of chunks if fewer tasks run than there are logical workers."""
GOLDEN_SHARE = (math.sqrt(5) - 1) / 2
"""Its multiples have fractional parts that are evenly distributed in [0, 1), however many."""
MOST_IN_WINDOW = 1024
"""Batches in flight, even if they are tiny: dpex keeps the indices of each."""
LEAST_CPU_SHARE = 1 / 64
"""Lower bound of the CPU share of a batch's time: at most 64 tasks run for each free core."""

# --- drawing of indices in the training loop ------------------------------------------------------
# Benchmark: `bench-tax`.

CHUNKS_PER_STEP = 2
"""Chunks drawn in one call of ``next()``, so that no step of the training takes much longer."""
DRAW_S = 0.01
"""Time for the drawing of one chunk; the rest of it is drawn in a later step."""
PROMPT_S = 0.05
"""A wait of at most this time draws nothing meanwhile."""
GATHER_S = 0.002
"""Chunks that are drawn within this time are sent in one message."""

# --- task leases ----------------------------------------------------------------------------------
# Benchmark: `bench-latency`, also with `DPEX_PUBLIC_RAY_ONLY=1`.

FIRST_TASKS = 1
"""Tasks that start with a pipeline. A second process would delay the first batch by 17 %."""
LEASE_S = 5.0
"""Length of a lease if other Ray tasks may want what its task holds; else it has no limit."""
ACTOR_LEASE_S = 30.0
"""The same if the task runs in an actor, whose process ends with the lease.

The next process takes some seconds to load torch and the dataset.
"""
IDLE_S = 0.5
"""How long a task waits for its next chunk if other Ray tasks may want what it holds."""
LONG_IDLE_S = 30.0
"""How long a task waits for its next chunk otherwise.

Without it, most tasks would end in the last second of each iteration. With 32 tasks that use public
names of Ray, starting them again takes two seconds of an iteration of seven.
"""
FREED_S = 0.25
"""Time until the cluster knows that a node's CPU is free: nodes exchange this ten times a second.

A task that starts earlier would not get the node that it prefers.
"""
ACTOR_FREED_S = 2.0
"""The same if the task ran in an actor: its process has to end before.

Without this pause, a task of another job waited for more than 100 s, probably because the head gave
the CPU to the next actor first.
"""
STUCK_IDLE_S = 1.0
"""Time without a request for a chunk after which samples may wait for other samples.

They may be those of logical workers that have not started. So dpex starts more tasks.
"""
STUCK_S = 3.0
"""The same time on a machine without an idle processor, where samples may also just take long."""
LOOK_S = 0.1
"""How often the scheduler checks conditions that change with time, and a worker process its run."""
MAX_DEATHS = 4
"""How often a worker process may die on one chunk or block. Ray restarts tasks without limit."""
MOST_LOSSES = 3
"""Losses of pipelines with no block in between, or of blocks of one batch, that fail the epoch."""
STREAM_TRIES = 2
"""How often dpex sends a stream's chunk to a task that makes no other chunk."""
STORE_FULL_TRIES = 6
"""How often dpex sends a chunk whose blocks Ray cannot store, in memory or on disk."""
STORE_FULL_WAIT_S = 2.0
"""Wait before each of these tries: Ray frees blocks some time after they have been read."""

# --- CPUs that training jobs share ----------------------------------------------------------------
# Benchmark: `tests/carriers/ray/test_fair_share.py`; `bench-scale` for the load on the recorder.

WAITED_FOR_LEASE_S = 1.0
"""Length of a lease while a task of another training job waits."""
HELD_BACK_S = 5.0
"""Period for which bound leases get no chunks while a task of another training job waits.

Then they get chunks for the same time. Such a lease has no time limit, and its task gets its CPU
back after a wait, even if none is free.
"""
PROCESS_STARTS_S = 10.0
"""Time after which a task of another job counts as waiting although CPUs are free.

Until then, it most likely waits for its process, which loads torch.
"""
POLL_S = 0.25
"""Pause between two reports of a pipeline actor, if there are few actors."""
REPORTS_PER_S = 64
"""Reports that the recorder answers in a second, however many actors there are."""
GONE_PAUSES = 3
"""Pauses without a report after which an actor counts as idle or dead, and ``GONE_S``."""
GONE_S = 3.0
"""Time without a report after which an actor counts as idle or dead, and ``GONE_PAUSES``."""
CALM_S = 5.0
"""Time without a waiting task after which each job may keep one, which an autoscaler sees."""

# --- blocks and messages --------------------------------------------------------------------------
# Benchmark: `bench-null` for sizes, `bench-jpeg` and `bench-latency` for times.

SMALL_BYTES = 100_000
"""Ray passes arguments below about this size in the call, not through the object store."""
ENTRY_BYTES = 100
"""What an entry without long texts adds to a message, besides its batch."""
BLOCK_BYTES = 8 << 20
"""A task sends a block of this size at once."""
BLOCK_S = 0.25
"""A task sends a block that has taken this much time."""
LONG_BATCH_S = 0.025
"""A task sends a batch that has taken this much time at once: the next batch may never end."""
PATIENT_S = 2.0
"""Replaces both time limits if enough is in flight before the chunk: fewer blocks cost less."""
SHORT_CHUNK = 4
"""Batches of a chunk at the start and end of an epoch, where the training loop waits for each."""
NEARLY_S = 0.01
"""A task asks for its next chunk this long before the end of its chunk.

The pipeline actor answers within some milliseconds if all tasks ask at once. A chunk must not wait
longer than this for a task that is still making another chunk.
"""
KEEP_CPU_S = 1.0
"""How long a task that waits for an answer keeps its CPU.

``ray.get`` releases the CPU, and Ray may start another process on it.
"""
MOST_UNANSWERED = 16
"""Unanswered messages of a sender. The pipeline actor remembers four times as many."""
FETCHES = 4
"""Threads that fetch blocks in the training process without private names of Ray."""

# --- memory ---------------------------------------------------------------------------------------
# Benchmark: `bench-null` and `bench-memory`.

OUT_OF_BAND_BYTES = 2048
"""A smaller buffer stays in the pickle: an out-of-band buffer would cost more than the copy."""
LARGE_ARRAY_BYTES = 1 << 20
"""An array of this size is an Arrow column, or is mapped.

A memcpy of a smaller one costs less than a column or the system calls of a mapping, which also
keeps a file open.
"""
MOST_SPARE = 1.25
"""A segment may be larger than the tensor in it by at most this factor."""
IDLE_BYTES = 128 << 20
"""Idle segments that a worker process keeps for later batches."""
SEGMENT_BYTES = 1 << 20
"""A tensor of this size is always in a segment, and is made there if dpex collates it."""
SEGMENTS_FOR_BLOCK = 8
"""Smaller tensors of a block that are copied to segments, so that a call can carry the block.

A block in the object store costs the worker process 2.5 ms and the raylet 1 ms. A segment costs
both ends together 0.02 to 0.13 ms.
"""
LEAST_SEGMENT_BYTES = 16 << 10
"""Least size of these tensors: rounded up to pages, a segment is at most ``MOST_SPARE`` larger."""
MOST_MAPPED = 1 << 14
"""Segments that the training process maps, a quarter of the mappings that Linux allows it."""
TRIM_SHARE = 1 / 8
"""Share of the idle mapped segments, or of their limit, that is released before the next look."""
IDLE_MAPPED_BYTES = 512 << 20
"""Idle segments that the training process keeps mapped. Living processes would keep most anyway."""
MOST_SEGMENTS = 128
"""Segments of a worker process, each of which is an open file."""
MALLOC_KEEPS_BYTES = 1 << 29
"""Free memory that malloc keeps in a worker process for the next batch."""

# --- comparisons of dataset copies ----------------------------------------------------------------
# Benchmark: `bench-tiny` and `bench-memory`.

WATCHED_PICKLE_BYTES = 4 << 20
"""A copy with a larger pickle, buffers apart, stays bound: it takes tens of milliseconds."""
WATCHED_BYTES = 64 << 20
"""A copy with a larger pickle, buffers included, stays bound."""
COMPARED_AGAIN = 4
"""A released copy is compared again after this many times the batches of the last comparison."""
COMPARING_SHARE = 0.003
"""It is compared earlier if the last comparison took at most this share of the time since."""

# --- time limits ----------------------------------------------------------------------------------

HOPELESS_S = 60.0
"""A task that is pending after this time requests resources that no node has."""
TASKS_START_S = 300.0
"""Time without a start after which Ray Data counts as unable to start tasks.

A worker process first imports torch, which takes minutes on a slow file system or a busy machine.
Ray itself holds tasks of one kind back for up to 10 s.
"""
CLUSTER_LOOK_S = 5.0
"""How often dpex looks at what costs a call to the head: its nodes, their room, the recorder."""
QUIET_S = 1.0
"""A new iteration waits this long for the tasks of a cancelled one."""
STATE_QUIET_S = 60.0
"""The same for persistent logical workers, which keep state: torch waits for them as well."""
END_S = 5.0
"""How long a closed pipeline waits for its execution and tasks; torch gives its workers as long."""
PROCESS_END_S = 1.0
"""How long the end of a process may take that is killed, or whose segments are gone already."""
NODE_REPLACED_S = 10.0
"""Ray mostly restarts the work of a dead node elsewhere within this time."""
NODE_JOINS_S = 300.0
"""How long a loader waits for a node that meets ``worker_options``, if nothing starts nodes."""
ACTOR_AWAY_S = 30.0
"""How long a worker process calls a pipeline actor that it cannot reach."""
PAUSE_S = 0.02
"""Pause before each of these calls, or before a look whether a replaced process has ended."""
ASK_AGAIN_S = 2.0
"""Pause before a worker process asks again whether its pipeline is closed."""
RECORDER_ANSWER_S = 2.0
"""How long a pipeline actor waits for the recorder of shared CPUs."""
HEAD_ANSWER_S = 1.0
"""How long the cluster's head may take then; a dead head is left to Ray."""
SLOW_WAIT_S = 5.0
"""dpex explains a wait after this time, and then after intervals that double."""
MOST_NOTE_S = 300.0
"""The longest of these intervals."""
PUBLISH_S = 1.0
"""How often ``stats()`` is published as Ray metrics."""
EXIT_S = 2.0
"""How long the end of the training process waits for Ray's answers."""
UNPICKLED_S = 30.0
"""How long that end waits for the batch that a thread unpickles, which may run the user's code."""

CLUSTER_ANSWER_S = 15.0
"""How long dpex waits for the head of a cluster that the user names."""
JOIN_S = 30.0
"""How long a process takes at most to join a cluster whose head has answered."""
CLIENT_JOIN_S = 45.0
"""How long an attempt to connect through Ray Client takes at most.

Its server starts a process that loads Ray and dpex, and waits at most 30 s for that process.
"""
CLIENT_JOIN_TRIES = 3
"""How often a Ray Client tries to connect if the server's process for it crashes."""
LOOKUP_S = 2.0
"""How long a name server may take for an address, or the head of a cluster of this machine."""
VERSIONS_S = 10.0
"""How long the nodes of a cluster have to tell their versions; later answers are not checked."""
START_S = 120.0
"""How long a local Ray may take to start."""
EARLY_CHUNK_BYTES = 64 << 10
"""The largest chunk that a process gets while it makes another one: a socket holds more bytes."""
MOST_FAILED_STARTS = 3
"""Processes of a logical worker in a row that may end before their first sample."""

CORES_SPAN_S = 0.3
"""Span over which idle cores are measured: the kernel counts in hundredths of a second."""

# --- limits of warnings ---------------------------------------------------------------------------

LARGE_DATASET_BYTES = 100 << 20
"""dpex warns about a larger dataset, which is better built on the nodes that read it."""
LEAST_STORE_BYTES = 75 << 20
"""Ray does not start with a smaller object store."""
LARGE_PICKLE_BYTES = 16 << 20
"""dpex warns about a larger pickle, buffers apart: that of a list of a million small objects."""
SLOW_PICKLING_S = 1.0
"""dpex warns if two calls of ``iter()`` took this long to pickle the dataset."""

# --- limits that only bound memory ----------------------------------------------------------------

MAX_ENDED_LEASES = 256
"""Ended leases that are kept, because Ray restarts a task if its output is lost."""
MAX_REPLACED = 16
"""Processes that a task waits for, because Ray has restarted their tasks: more than die at once."""
MOST_REMEMBERED = 10_000
"""Blocks, senders and closed pipelines that an actor remembers: far more than exist at once."""
MOST_NODES_ASKED = 64
"""Nodes that tell their versions: the nodes of a cluster come from a few images."""
PACKAGE_KEPT_S = 60 * 86_400
"""How long an uploaded package lives that only tasks name.

Ray deletes it otherwise, and a node that joins weeks after the start must still find it.
"""
