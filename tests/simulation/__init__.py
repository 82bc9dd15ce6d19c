"""A search for races: the real protocol on virtual time, with faults that a seed draws.

- ``clock.py``: virtual time, and the order of ready events.
- ``plan.py``: what a seed draws: the loader, its dataset, the machines, the faults.
- ``network.py``: messages that links delay, reorder, repeat, drop and cut.
- ``machines.py``: nodes, worker processes and the objects that nodes store.
- ``attempts.py``: the attempts of tasks, each of which drives a ``WorkerLoop``.
- ``pipelines.py``: pipelines, each of which drives a ``Scheduler`` as the pipeline actor does.
- ``loader.py``: the training loop, which drives a ``Delivery``.
- ``faults.py``: the faults.
- ``invariants.py``, ``states.py`` and ``budgets.py``: checks during a schedule: of batches, of the
  state of dataset copies, and of retries. ``model.py``: checks of its history afterwards.
- ``scale.py``: loaders of many nodes, with measured times and without random faults.
- ``schedule.py``: one schedule. ``mutations.py``: planted bugs, which the search has to find.
"""
