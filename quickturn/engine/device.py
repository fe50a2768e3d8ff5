"""Which device a rank computes on."""

import torch


def pick_device(name: str, local_rank: int = 0, local_ranks: int = 1, ranks_per_gpu: int = 1) -> torch.device:
    """The device called `name` for rank `local_rank` of `local_ranks` on this machine; 'auto' is the GPU if
    there is one. Of several GPUs each rank has its own, or each `ranks_per_gpu` of them have one together.
    Raises ValueError for one that isn't there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, but PyTorch sees no GPU; use --device cpu")
    needed = -(-local_ranks // ranks_per_gpu)
    if device.index is not None and needed > 1:
        raise ValueError(
            f"{local_ranks} ranks of this machine need {needed} GPUs, but {name!r} is one: use --device cuda,"
            " and CUDA_VISIBLE_DEVICES to choose among GPUs"
        )
    if device.index is None:
        device = torch.device("cuda", local_rank // ranks_per_gpu)
    needed, there = max(device.index + 1, needed), torch.cuda.device_count()
    if needed > there:
        what = f"{local_ranks} ranks of this machine need" if local_ranks > 1 else f"device {name!r} needs"
        raise ValueError(
            f"{what} {needed} GPUs, but PyTorch sees {there} here: take a smaller --tp, --dp or --cp, or more"
            " machines"
        )
    return device
