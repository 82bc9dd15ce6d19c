"""What the programs of several ranks share: joining the group, and which device is a rank's."""

import os

import torch
import torch.distributed as dist


def join_group(rank: int | None = None, ranks: int | None = None) -> torch.device:
    """Join the process group, as torchrun's environment says unless it is given.

    Args:
        rank: This process's number, where torchrun did not start it.
        ranks: How many there are.

    Returns:
        A GPU of this rank's own if the host has one for each, else the CPU.
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
