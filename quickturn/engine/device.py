"""Which device a rank computes on."""

import torch


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """The device called `name`; 'auto' is the GPU if there is one. Of several GPUs each rank of this machine
    has its own. Raises ValueError for one that isn't there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, but PyTorch sees no GPU; use --device cpu")
    if device.index is None:
        device = torch.device("cuda", local_rank)
    if device.index >= torch.cuda.device_count():
        raise ValueError(
            f"rank {local_rank} of this machine needs a GPU of its own, but PyTorch sees"
            f" {torch.cuda.device_count()} here: take a smaller --tp, --dp or --cp, or more machines"
        )
    return device
