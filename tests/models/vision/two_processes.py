"""What each of two processes does: gradients of its half of the batch, averaged by DistributedDataParallel."""

import torch
import torch.distributed as dist
from tests.models.vision.cases import HOSTS, images, stir
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from linattn.models.vision import convert, create_deit_lion

# Every family of backbones, and timm's families whose conversion leaves something out.
DEIT = {"depth": 1, "img_size": 32, "embed_dim": 16, "num_heads": 2, "num_classes": 5, "drop_path_rate": 0.0}
CONVERTED = {
    "beit": {"use_rel_pos_bias": False, "use_shared_rel_pos_bias": True},
    "swin": {},
    "pvt": {"reduction": "drop"},
}


def names():
    return [*HOSTS, "deit", *CONVERTED]


def create(name: str) -> nn.Module:
    """fp64; running statistics stay as they are, since each process sees a batch of its own."""
    torch.manual_seed(0)
    if name == "deit":
        model: nn.Module = create_deit_lion("tiny", **DEIT)
    elif name in CONVERTED:
        from tests.models.vision.timm_cases import build

        own = CONVERTED[name]
        options = {"reduction": own["reduction"]} if "reduction" in own else {}
        model = convert(build(name, **({} if options else own)), "mirror", **options).model
    else:
        model = HOSTS[name]()
    stir(model)
    model.double().train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return model


def gradients(model: nn.Module, rank: int | None) -> dict[str, torch.Tensor]:
    own = images(32, 32, batch=4).double()
    part = own if rank is None else own[2 * rank : 2 * rank + 2]
    model(part).square().sum(1).mean().backward()
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    return {name: p.grad for name, p in plain.named_parameters()}


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    try:
        found = {}
        for name in names():
            model = DistributedDataParallel(create(name), find_unused_parameters=False)
            gradients(model, rank)
            for p in model.parameters():
                p.grad = None
            found[name] = gradients(model, rank)  # a second step finds out what the first left unused
        if rank == 0:
            torch.save(found, f"{folder}/gradients.pt")
    finally:
        dist.destroy_process_group()
