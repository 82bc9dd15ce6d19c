"""Carriers move chunks to worker processes and batches back; ``choice.py`` selects one.

``processes/`` is the carrier of one machine. The carrier of a cluster is ``dpex.pipeline``, which
runs Ray Data.
"""
