"""The function with which the examples with several ranks join the process group."""

import os

import torch
import torch.distributed as dist


def join_group(rank: int | None = None, ranks: int | None = None) -> torch.device:
    """Join the process group.

    Args:
        rank: Rank of this process; None to use the rank in torchrun's environment.
        ranks: Number of ranks; None to use the number in torchrun's environment.

    Returns:
        The GPU of this rank if the node has a GPU for each of its ranks, else the CPU.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", rank or 0))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", ranks or 1))
    own_gpu = torch.cuda.device_count() >= local_ranks
    if own_gpu:
        torch.cuda.set_device(local_rank)
    dist.init_process_group(
        "nccl" if own_gpu else "gloo",
        rank=-1 if rank is None else rank,
        world_size=-1 if ranks is None else ranks,
    )
    return torch.device("cuda", local_rank) if own_gpu else torch.device("cpu")
