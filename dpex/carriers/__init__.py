"""Carriers move chunks to worker processes and batches back; ``choice.py`` selects one.

``processes/`` is the carrier of one machine, and ``ray/`` is that of a cluster, on Ray Data.
"""
