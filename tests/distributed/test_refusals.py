"""What ranks must not be given is refused on all of them, and the remedy of each refusal works."""

from __future__ import annotations

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from ghostclip import GhostClipper, PrivacyEngine
from ghostclip.data.physical_batches import BatchMemoryManager
from ghostclip.distributed import ShardedModel, weights
from ghostclip.errors import GhostClipError, UnsupportedModelError
from tests.distributed.loops import data, model
from tests.distributed.refusals import find
from tests.distributed.spawned import found_by_ranks
from tests.private_run import PrivateRun

pytestmark = pytest.mark.distributed
RANKS = 2
GOES = {
    "draw: equal", "draw: dealt out", "draw: sampled by the user", "broadcast: last bit", "broadcast: stage",
    "sampler: remedy", "sampler: other remedy", "wrapper: static, first",
    "model: tried twice", "loader: random records",
    "step: none",
}  # fmt: skip
REFUSED = {
    "draw: sharded again": "rank 0: draw 0 of 5 records, 5 rows seen; rank 1: draw 1 of 4 records, 4 rows seen",
    "draw: too few rows": "draw 3 of 9 records, 3 rows seen",
    "draw: another bound": "rank 1 clips to 0.6 and adds noise of 1, rank 0 clips to 0.5",
    "draw: another noise": "adds noise of 1.1, rank 0",
    "noise of another checkpoint": "the noise of rank 1 is not that of rank 0",
    "another order": "rank 1 exchanges its step, rank 0 its size",
    "model: last bit": "'3.bias' of rank 1 has other values than rank 0's",
    "model: buffer": "'count' of rank 1 has other values",
    "model: stage": "ghostclip.distributed.broadcast_parameters(model)",
    "model: frozen": "'3.bias' of rank 1 is frozen, of rank 0 trainable",
    "model: shape": "'3.weight' is (7, 4) torch.float64 on rank 1, (3, 4) torch.float64 on rank 0",
    "model: name": "'4.weight' is (3, 3) torch.float64 on rank 1, missing on rank 0",
    "model: dtype": "'0.weight' is (5, 4) torch.float32 on rank 1",
    "broadcast: shape": "Only copies of one model can be broadcast",
    "model: evaluation": "evaluation mode",
    "optimizer: on one": "LBFGS",
    "mechanism: sigma": "mechanism (σ, C, clipping) of rank 1 is (2.0, 0.5, ",
    "account: accountant": "accountant of rank 1 is ",
    "mechanism: reduction": "loss_reduction of rank 1 is ",
    "step: another noise multiplier": "adds noise of 1, rank 0 clips to 0.5 and adds 0.5",
    "step: another bound": "rank 1 clips to 0.6",
    "step: another learning rate": "the optimizer of rank 1 has another learning rate",
    "step: another order": "the optimizer of rank 1 trains other parameters than that of rank 0, or in another order",
    "step: one frozen": "the optimizer of rank 1 trains other parameters than that of rank 0",
    "step: a lost update": "rank 1 and rank 0 have not made the same updates",
    "sampler: four ranks": "num_replicas=4: 2 rank(s) train here",
    "sampler: other records": "over 9 records: the loader's data set has 21",
    "sampler: apart": "Leave the sampler or distributed=False out",
    "loader: empty on one": "the data set is empty",
    "loader: another order on one": "Give all ranks the same records in the same order",
    "loader: mixed on one": "depends on the record beside it",
    "loader: not a loader on one": "is no torch.utils.data.DataLoader",
    "wrapper: apart": "Leave out distributed=False",
    "wrapper: apart, second": "nothing adds up the ranks' clipped sums",
    "wrapper: bare clipper": "nothing adds up the ranks' clipped sums",
    "wrapper: static": "Leave static_graph, or the wrapper, out",
    "wrapper: devices": "module.module",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each try came to on each rank."""
    return found_by_ranks(find, RANKS, tmp_path_factory.mktemp("refusals"), meshes=False)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_every_rank(found, name):
    (kind, message), (other_kind, other_message) = (rank[name] for rank in found)
    assert REFUSED[name] in message
    assert REFUSED[name] in other_message
    assert {kind, other_kind} <= {
        "InvalidOptionError",
        "UnsupportedModelError",
        "IllegalModuleConfigurationError",
        "DataError",
        "AttributeError",
    }


@pytest.mark.parametrize("name", sorted(GOES))
def test_remedies_and_sound_steps_go_through(found, name):
    assert [rank[name] for rank in found] == [("", "")] * RANKS


def test_a_rank_that_refuses_a_step_stops_the_others_and_raises_its_own_error(found):
    assert found[0]["draw: one refuses"][0] == "InvalidOptionError"
    assert "rank 1 refuses this step" in found[0]["draw: one refuses"][1]
    assert found[1]["draw: one refuses"] == ("", "")


STOPPED = {"step: every other batch": "DrawError", "step: a row less": "DrawError", "step: no backward": ""}


@pytest.mark.parametrize("name", STOPPED)
def test_no_rank_steps_where_one_of_them_does_not(found, name):
    kinds = {rank[name][0] for rank in found}
    assert "" not in kinds
    assert kinds & {STOPPED[name] or "MissingGradientError"}
    assert kinds <= {"DrawError", "MissingGradientError", "InvalidOptionError"}


def test_a_rank_says_what_another_one_was_refused_for(found):
    assert found[0]["model: evaluation"][0] == found[1]["model: evaluation"][0]
    assert found[0]["model: evaluation"][0] == "IllegalModuleConfigurationError"
    assert found[0]["model: evaluation"][1].startswith("rank 1 was refused")


def test_every_try_is_judged(found):
    assert set(found[0]) == GOES | set(REFUSED) | {"draw: one refuses", *STOPPED}


@pytest.fixture
def group_of_one():
    """A process group of one rank."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def _sharded(how, net):
    if how == "wrapper":
        return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    mesh = init_device_mesh("cpu", (1,))
    if how == "two axes":
        both = init_device_mesh("cpu", (1, 1), mesh_dim_names=("rows", "columns"))
        net[0].weight = nn.Parameter(distribute_tensor(net[0].weight.detach(), both, [Shard(0), Shard(1)]))
        return net
    if how == "parts of a sum":
        net[0].weight = nn.Parameter(DTensor.from_local(net[0].weight.detach(), mesh, [Partial()]))
        return net
    if how == "meta":
        net = net.to("meta")
    fully_shard(net[0], mesh=mesh)
    return fully_shard(net, mesh=mesh)


def _private(net, *, optimizer=None, **options):
    made = {} if optimizer is None else {"optimizer": optimizer}
    mode = "hooks" if options else "auto"
    run = PrivateRun(data(), model=net, engine=PrivacyEngine(**options), batch_size=4, grad_sample_mode=mode, **made)
    return run.model, run.optimizer, run.loader


def _evaluated(net):
    with torch.no_grad():
        net(torch.randn(3, 4, dtype=torch.float64))
    # What a root has gathered it keeps for a backward.
    assert not hasattr(net[3].weight, "placements")


def _attempt(how):
    net = model()
    if how == "after the optimizer":
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        _private(_sharded(how, net), optimizer=optimizer)
    elif how == "an optimizer of gathered parameters":
        net = _sharded(how, net)
        _evaluated(net)
        _private(net)
    elif how == "bare clipper":
        GhostClipper(_sharded(how, net), max_grad_norm=1.0)
    elif how == "after the clipper":
        GhostClipper(net, max_grad_norm=1.0)
        _sharded(how, net)(torch.randn(3, 4, dtype=torch.float64))
    elif how == "whole numbers":
        _private(_sharded(how, net), noise_level="exact")
    elif how == "a budget below 1":
        GhostClipper(net, max_grad_norm=1.0, sharded=ShardedModel(_sharded(how, net)), memory_budget=0.5)
    elif how == "slices of a loss":
        clipper = GhostClipper(net, max_grad_norm=1.0, sharded=ShardedModel(_sharded(how, net)))
        clipper.backward_in_chunks(net(torch.randn(3, 4, dtype=torch.float64)), lambda hidden, at: hidden, positions=1)
    elif how == "sizes of its own":
        _, optimizer, loader = _private(_sharded(how, net))
        BatchMemoryManager(data_loader=loader, max_physical_batch_size="auto", optimizer=optimizer)
    else:
        _private(_sharded(how, net))


SHARDED = {
    "wrapper": r"^module \(FullyShardedDataParallel\): .* Use torch.distributed.fsdp.fully_shard",
    "two axes": r"^parameter '0.weight' lies on another mesh .* Use one axis of one mesh for tensor parallelism",
    "parts of a sum": r"^parameter '0.weight' is placed as P.* along mesh axis '0': supported are Shard, Replicate",
    "meta": r"^parameter '0.weight' is on the meta device",
    "after the optimizer": r"Build the optimizer from module.parameters\(\)",
    "an optimizer of gathered parameters": r"module.parameters\(\), after module.reshard\(\) where a forward",
    "bare clipper": r"GhostClipper\(model, sharded=",
    "after the clipper": r"^FSDPSequential was divided by fully_shard after the clipper .* Divide the model first",
    "whole numbers": r"noise_level='exact' with parameters that ranks hold in parts",
    "a budget below 1": r"memory_budget=0.5 with a model that is sharded",
    "slices of a loss": r"backward_in_chunks with a model that ranks hold in parts",
    "sizes of its own": r"max_physical_batch_size='auto' with a model that several ranks hold",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", SHARDED)
def test_sharded_models_are_refused_by_name(group_of_one, how):
    with pytest.raises(GhostClipError, match=SHARDED[how]):
        _attempt(how)


@pytest.mark.filterwarnings("ignore")
def test_a_model_may_have_been_evaluated_before_it_is_made_private(group_of_one):
    net = _sharded("evaluated", model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    _evaluated(net)
    private, optimizer, loader = _private(net, optimizer=optimizer)
    trained = [p for p in net.parameters() if p.requires_grad]
    before = [p.to_local().clone() for p in trained]
    _, x, y = next(iter(loader))
    nn.functional.cross_entropy(private(x), y).backward()
    optimizer.step()
    assert all(not torch.equal(p.to_local(), old) for p, old in zip(trained, before, strict=True))


@pytest.mark.filterwarnings("ignore")
def test_a_private_model_is_not_sharded_afterwards(group_of_one):
    with pytest.raises(UnsupportedModelError, match="FSDPGradSampleModule in place of a private model's class"):
        fully_shard(_private(model())[0], mesh=init_device_mesh("cpu", (1,)))


def _step(private, optimizer, loader):
    _, x, y = next(iter(loader))
    nn.functional.cross_entropy(private(x), y).backward()
    optimizer.step()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", ["", "3"], ids=["the model", "a layer"])
def test_a_model_inside_a_private_one_is_not_sharded_afterwards(group_of_one, path):
    net = model()
    private = _private(net)
    fully_shard(net.get_submodule(path), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(UnsupportedModelError, match="after the clipper was attached"):
        _step(*private)
    with pytest.raises(GhostClipError):
        private[1].step()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", ["", "3"], ids=["the model", "a layer"])
def test_a_model_inside_a_private_one_is_sharded_once_it_is_an_ordinary_one_again(group_of_one, path):
    net, engine = model(), PrivacyEngine()

    def made_private():
        run = PrivateRun(data(), model=net, engine=engine, batch_size=16)
        return run.model, run.optimizer, run.loader

    private, optimizer, loader = made_private()
    private.remove_hooks()
    fully_shard(net.get_submodule(path), mesh=init_device_mesh("cpu", (1,)))
    private, optimizer, loader = made_private()
    before = net[3].weight.to_local().clone()
    _step(private, optimizer, loader)
    assert not torch.equal(net[3].weight.to_local(), before)
    assert [count for _, _, count in engine.accountant.history] == [1]


@pytest.fixture(params=[0, 3])
def one_of_four(request):
    """A process group of four ranks of which this is one."""
    distributed.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=4)
    yield
    distributed.destroy_process_group()


def test_a_table_of_which_some_ranks_would_hold_nothing_is_refused_by_all(one_of_four):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    for rows in (3, 6):
        net = nn.Sequential(nn.Embedding(rows, 4), nn.Linear(4, 2))
        parallelize_module(net, mesh, {"0": RowwiseParallel(input_layouts=Replicate())})
        with pytest.raises(UnsupportedModelError, match=rf"'0.weight' has {rows} rows for 4 ranks \(mesh axis 'tp'\)"):
            ShardedModel(net)
    ShardedModel(parallelize_module(nn.Embedding(4, 4), mesh, RowwiseParallel(input_layouts=Replicate())))


def test_copies_of_a_part_are_compared_with_each_other(monkeypatch):
    """Of four ranks each two hold one half: what one half is says nothing of the other."""
    net, held = nn.Linear(2, 1, bias=False), [("left", 1), ("right", 2), ("left", 1), ("right", 2)]

    def gathered(what, entries, group):
        return [[entries[0]._replace(part=part, digest=digest)] for part, digest in held]

    monkeypatch.setattr(weights, "world_size", lambda group: len(held))
    monkeypatch.setattr(weights, "gathered", gathered)
    weights.require_equal_weights(net)
    held[3] = ("right", 3)
    with pytest.raises(UnsupportedModelError, match=r"'weight' of rank 3 has other values than rank 1's"):
        weights.require_equal_weights(net)
