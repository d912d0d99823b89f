"""Loops on two processes: plain ranks, accelerate, DistributedDataParallel, sharded parameters, pipeline stages."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from tests.loops.loop import Loop
from tests.loops.models import cross_entropy, functional, mlp
from tests.loops.rows import row
from tests.loops.world import BATCH, World

LOOPS: list[Loop] = []
_TWO = {"ranks": 2, "clips": (1.0,)}
_ACCELERATE = {"hosts": ("accelerate",), "clips": (1.0,)}


def _train(model: nn.Module, optimizer: Any, loader: Any, backward: Any = None) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        (backward or (lambda value: value.backward()))(loss)
        optimizer.step()


def _bare(world: World) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = world.watch(mlp, cross_entropy(world))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@row(LOOPS, **_TWO, expect="exact", releases=4)
def two_ranks(world: World) -> None:
    """make_private on both ranks, no DDP."""
    model, optimizer = _bare(world)
    _train(*world.private(model, optimizer, world.loader()))


@row(LOOPS, **_TWO, sampling="shuffled")
def two_ranks_shuffled(world: World) -> None:
    """Two ranks, poisson_sampling=False."""
    model, optimizer = _bare(world)
    _train(*world.private(model, optimizer, world.loader(), poisson_sampling=False))


@row(LOOPS, **_TWO)
def ranks_of_other_weights(world: World) -> None:
    """Ranks hold other layers of equal shape, as stages of a pipeline do: rank 0's must not replace them."""
    world.seed += world.rank
    model, optimizer = _bare(world)
    before = [p.detach().clone() for p in model.parameters()]
    _train(*world.private(model, optimizer, world.loader()))
    if not all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)):
        world.said = "the weights of a rank were replaced by those of another, without a word"


@row(LOOPS, **_TWO)
def ddp_first(world: World) -> None:
    """DistributedDataParallel first, make_private second."""
    model, optimizer = _bare(world)
    parallel = nn.parallel.DistributedDataParallel(model)
    _train(*world.private(parallel, optimizer, world.loader()))


@row(LOOPS, **_TWO)
def ddp_second(world: World) -> None:
    """make_private first, DistributedDataParallel around the private model."""
    model, optimizer = _bare(world)
    model, optimizer, loader = world.private(model, optimizer, world.loader())
    _train(nn.parallel.DistributedDataParallel(model), optimizer, loader)


@row(LOOPS, **_TWO)
def distributed_sampler(world: World) -> None:
    """A loader with DistributedSampler, as DDP scripts have it."""
    model, optimizer = _bare(world)
    data = world.data
    # The draws are those of the loader's generator; without one every run would draw others.
    generator = world.loader().generator
    sampler = DistributedSampler(data, seed=world.seed)
    loader = DataLoader(data, batch_size=BATCH // 2, sampler=sampler, generator=generator)
    _train(*world.private(model, optimizer, loader))


@row(LOOPS, **_TWO, hosts=("accelerate",))
def accelerator_prepares_the_private_loader(world: World) -> None:
    """make_private, then accelerator.prepare of model, optimizer and loader, on two processes."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = _bare(world)
    model, optimizer, loader = world.private(model, optimizer, world.loader())
    optimizer, loader = accelerator.prepare(optimizer, loader)
    _train(model, optimizer, loader, accelerator.backward)


@row(LOOPS, **_TWO, hosts=("accelerate",))
def accelerator_prepares_everything(world: World) -> None:
    """The same, the model prepared too, which wraps it in DistributedDataParallel."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = _bare(world)
    prepared = accelerator.prepare(*world.private(model, optimizer, world.loader()))
    _train(*prepared, accelerator.backward)


@row(LOOPS, **_TWO, hosts=("accelerate",))
def accelerator_prepares_first(world: World) -> None:
    """accelerator.prepare, then make_private, on two processes."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = _bare(world)
    prepared = accelerator.prepare(model, optimizer, world.loader())
    _train(*world.private(*prepared), accelerator.backward)


@row(LOOPS, **_ACCELERATE, expect="exact")
def accelerate_on_one_process(world: World) -> None:
    """make_private, then accelerator.prepare, on one process."""
    _accelerated(world, {})


@row(LOOPS, **_ACCELERATE, expect="exact", tolerance=1e-2)
def accelerate_in_bf16(world: World) -> None:
    """The same in bf16: accelerate sets forward on the model."""
    _accelerated(world, {"mixed_precision": "bf16"}, torch.float32)


@row(LOOPS, **_ACCELERATE, expect="refused")
def accelerate_accumulates(world: World) -> None:
    """gradient_accumulation_steps=2 and accelerator.accumulate."""
    from accelerate import Accelerator

    _fresh()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = _bare(world)
    model, optimizer, loader = accelerator.prepare(*world.private(model, optimizer, world.loader()))
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()


@row(LOOPS, **_ACCELERATE)
def resumed_through_accelerate(world: World) -> None:
    """accelerator.save_state and load_state."""
    from accelerate import Accelerator

    for resume in (False, True):
        _fresh()
        world.restart()
        accelerator = Accelerator(cpu=True)
        model, optimizer = _bare(world)
        model, optimizer, loader = accelerator.prepare(*world.private(model, optimizer, world.loader()))
        if resume:
            accelerator.load_state(f"{world.folder}/state")
        _train(model, optimizer, loader, accelerator.backward)
        accelerator.save_state(f"{world.folder}/state")


def _fresh() -> None:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def _accelerated(world: World, options: dict[str, Any], dtype: torch.dtype = torch.float64) -> None:
    from accelerate import Accelerator

    _fresh()
    accelerator = Accelerator(cpu=True, **options)
    model = world.watch(lambda: mlp().to(dtype), None if options else cross_entropy(world))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(*world.private(model, optimizer, world.loader()))
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(functional.cross_entropy(model(x.to(dtype)), y))
        optimizer.step()


@row(LOOPS, clips=(1.0,))
def saved_by_distributed_checkpoint(world: World) -> None:
    """torch.distributed.checkpoint.save and load of what state_dict() of model and optimizer return."""
    from torch.distributed import checkpoint

    for resume in (False, True):
        world.restart()
        bare, optimizer = _bare(world)
        model, optimizer, loader = world.private(bare, optimizer, world.loader())
        if resume:
            states = {"model": bare.state_dict(), "optimizer": optimizer.state_dict()}
            checkpoint.load(states, checkpoint_id=f"{world.folder}/plain")
            optimizer.load_state_dict(states["optimizer"])
        _train(model, optimizer, loader)
        states = {"model": bare.state_dict(), "optimizer": optimizer.state_dict()}
        checkpoint.save(states, checkpoint_id=f"{world.folder}/plain")


@row(LOOPS, clips=(1.0,))
def resumed_through_distributed_checkpoint(world: World) -> None:
    """The same through get_state_dict and set_state_dict, which step an optimizer that has no state yet."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    for resume in (False, True):
        world.restart()
        model, optimizer = _bare(world)
        model, optimizer, loader = world.private(model, optimizer, world.loader())
        if resume:
            states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            checkpoint.load(states, checkpoint_id=f"{world.folder}/dcp")
            set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        _train(model, optimizer, loader)
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        checkpoint.save(states, checkpoint_id=f"{world.folder}/dcp")


@row(LOOPS, **_TWO)
def fsdp2(world: World) -> None:
    """fully_shard, then make_private."""
    from torch.distributed.fsdp import fully_shard

    model, _ = _bare(world)
    fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
    _train(*world.private(model, torch.optim.SGD(model.parameters(), lr=0.1), world.loader()))


@row(LOOPS, **_TWO)
def tensor_parallel(world: World) -> None:
    """parallelize_module, then make_private."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, _ = _bare(world)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    _train(*world.private(model, torch.optim.SGD(model.parameters(), lr=0.1), world.loader()))


@row(LOOPS, **_TWO)
def fsdp1(world: World) -> None:
    """FullyShardedDataParallel, then make_private."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model, _ = _bare(world)
    sharded = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    _train(*world.private(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1), world.loader()))


@row(LOOPS, **_TWO)
def hybrid_sharding(world: World) -> None:
    """fully_shard on a mesh of replicas and shards, then make_private."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, _ = _bare(world)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards")))
    _train(*world.private(model, torch.optim.SGD(model.parameters(), lr=0.1), world.loader()))
