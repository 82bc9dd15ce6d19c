"""The ``head_address`` of dpex's peers: what a user gets by default, and the Ray Data pipeline.

This module imports nothing of torch, Ray and dpex.
"""

from importlib.util import find_spec

__all__ = ["address_of"]


def address_of(peer: str) -> str:
    """Return the ``head_address`` of a peer.

    Args:
        peer: ``"dpex"``: as a user gets by default on one machine without a cluster. These are
            processes of this machine, or a local Ray in revisions that had no choice of a carrier.
            ``"local"``: a local Ray, with the whole Ray Data pipeline.
    """
    if peer == "dpex" and find_spec("dpex.carriers") and find_spec("dpex.carriers.choice"):
        return "processes"
    return "local"
