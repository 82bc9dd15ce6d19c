"""What dpex costs and what it gains, one case per file.

Run one with ``python -m benchmarks.benchmark_tiny``, the short set with ``make bench``, everything
with ``make bench-all``, which also writes the report.

Files:
    workloads.py          the datasets, importable by workers
    harness.py            the command line, the clock, the JSON record, the tables
    goals.py              what a figure is held to, and whether it gets there
    commands.py           the command that made each record
    against.py            the working tree beside another revision; ``make bench-against``
    verdicts.py           what the figures of two revisions say of each other
    peers.py              the loaders that dpex is compared with
    throughput.py         all peers in turn over one workload
    nodes.py              Ray nodes of this machine, and samples that wait
    both_modes.py         the same training with ``distribute_mode`` and without
    training_loops.py     training loops that are fed, and what they wait for
    plots.py              the SVG beside each record
    report.py             all records, written into the documentation
    archive.py            the figures of other runs, in one CSV
    training_tables.py    the report's tables of whole trainings
    benchmark_tiny.py     small images: the cost of a batch
    benchmark_jpeg.py     decoding and augmenting: the cost of real work, spread over workers
    benchmark_null.py     no work at all: the cost of moving 38 MB
    benchmark_ragged.py   padded texts: many small batches, no two of one shape
    benchmark_tabular.py  rows by ``__getitems__``: the cost of an index
    benchmark_latency.py  samples that wait: far more workers than cores
    benchmark_tax.py      what a loader costs the training loop beside it
    benchmark_seeding.py  what seeding every sample costs
    benchmark_accuracy.py whole trainings: losses step by step, and accuracy
    benchmark_gpu.py      a ResNet-50's step at full speed: how much of it stands still
    benchmark_training_speed.py  training time, and what of it waits, on 1 to 8 nodes
    benchmark_cached.py   photographs whose deterministic beginning is cached
    benchmark_cold.py     from a process's start to its first batch; ``start_up.py`` is the script
    benchmark_driver.py   the trainer's own cost of a batch, as epochs get longer
    benchmark_kept.py     what ``cached`` keeps samples in, beside what it might have
    benchmark_memory.py   the memory of eight workers; ``in_memory.py`` has the datasets
    benchmark_on_node.py  bytes that leave the trainer's node, counted by ``linked_node.py``
    benchmark_scale.py    samples a second as nodes join; ``scaling_model.py`` reckons on from it
    benchmark_store.py    pictures from an S3 server, ``object_store.py``
    benchmark_transport.py  batches of 38 MB beside a plain copy
    benchmark_uint8.py    bytes that normalising late saves
    benchmark_widen.py    the first batch as ``num_workers`` grows
    benchmark_worker_init.py  rate and memory with a ``worker_init_fn`` and without
"""
