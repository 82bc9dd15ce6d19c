"""What dpex costs and what it gains, one case per file.

Run one with ``python -m benchmarks.benchmark_tiny``, or the short set with ``make bench``.

Files:
    workloads.py       the datasets, importable by workers
    harness.py         the clock: interleaved epochs, the JSON record, the table of ratios
    benchmark_tiny.py  small images: the cost of a batch
    benchmark_jpeg.py  decoding and augmenting: the cost of real work, spread over workers
    benchmark_null.py  no work at all: the cost of moving 38 MB
    benchmark_tax.py   what a loader costs the training loop beside it
"""
