"""Benchmarks of dpex, most of them in comparison with other loaders; one case per file.

Run one case with ``python -m benchmarks.benchmark_tiny``, and the short set with ``make bench``.
``make bench-all`` runs all cases and writes the report.

Files:

- ``workloads.py``: datasets, in a module that workers can import
- ``harness.py``: command line, clock, JSON record and tables
- ``goals.py``: goals of the figures, and their verdicts
- ``commands.py``: the command that made each record
- ``against.py``: comparison of the working tree with another revision; ``make bench-against``
- ``verdicts.py``: verdicts of that comparison
- ``addresses.py``: where the workers of dpex's peers run
- ``peers.py``: the loaders that dpex is compared with
- ``throughput.py``: one workload, read by all peers in turn
- ``fresh.py``: measurements in fresh interpreters
- ``nodes.py``: Ray nodes on this machine, and samples that wait
- ``ray_processes.py``: processor time of Ray's processes
- ``both_modes.py``: the same training with ``distribute_mode`` on and off
- ``training_loops.py``: training loops, and their waiting times
- ``plots.py``: an SVG for each record
- ``report.py``: the report on all records, in the documentation
- ``archive.py``: the figures of other runs, in one CSV file
- ``training_tables.py``: tables of whole trainings for the report
- ``simulation_tables.py``: tables of simulated nodes for the report
- ``fault_tables.py``: tables of faults and endurance for the report
- ``benchmark_tiny.py``: small images; the overhead of a batch
- ``benchmark_jpeg.py``: decoding and augmentation; real work, spread over workers
- ``benchmark_null.py``: no work; the overhead of moving 38 MB
- ``benchmark_ragged.py``: padded texts; many small batches
- ``benchmark_tabular.py``: rows by ``__getitems__``; the overhead of an index
- ``benchmark_latency.py``: samples that wait; many more workers than cores
- ``benchmark_tax.py``: the overhead of a loader on the training loop
- ``benchmark_accuracy.py``: whole trainings; the loss of every step, and the accuracy
- ``benchmark_gpu.py``: training steps of a ResNet-50; the share of time that the GPU is idle
- ``benchmark_training_speed.py``: training time and waiting time on 1 to 8 nodes
- ``benchmark_cached.py``: photographs whose deterministic transforms are cached
- ``benchmark_cold.py``: time to the first batch of a process; ``start_up.py`` is the script
- ``benchmark_exit.py``: end of a short program, by itself and by Ctrl-C
- ``benchmark_driver.py``: processor time of the training process, in epochs of different lengths
- ``benchmark_memory.py``: memory of eight workers; ``in_memory.py`` has the datasets
- ``benchmark_on_node.py``: bytes of the rows of ``rows_in_file.py`` on the link of
  ``linked_node.py``
- ``benchmark_scale.py``: samples per second on 1 to 8 nodes; ``scaling_model.py`` extrapolates
- ``benchmark_service_times.py``: the times that ``tests/simulation/scale.py`` draws from
- ``benchmark_store.py``: pictures from the S3 server of ``object_store.py``
- ``benchmark_transport.py``: batches of 38 MB, compared with a plain copy
- ``benchmark_widen.py``: time to the first batch with 2 to 32 workers
- ``benchmark_worker_init.py``: rate and memory with and without a ``worker_init_fn``
"""
