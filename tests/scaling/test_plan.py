"""The plan of a mesh against the sizes, collectives and FLOPs of what it plans."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.flops import counter
from ghostclip import GhostClipper
from ghostclip.errors import GhostClipError, InvalidOptionError, UnsupportedModelError
from ghostclip.scaling import Mesh, blocks_of, load_planned, plan_devices, values_per_device

transformers = pytest.importorskip("transformers")

# So long that per-sample gradients of all layers are no larger than their factors.
LAYERS, WIDTH, T, B = 3, 32, 25, 4
SIZES = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 32, "tie_word_embeddings": False,
}  # fmt: skip
STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel, "colwise_gather_output": ColwiseParallel}


@pytest.fixture
def folder(tmp_path):
    transformers.LlamaConfig(architectures=["LlamaForCausalLM"], **SIZES).save_pretrained(tmp_path)
    return str(tmp_path)


def _plan(model, mesh="dp=1", *, dtype=torch.float32, trainable="", **options):
    devices = Mesh.parse(mesh)
    planned = load_planned(model, batch_size=2, context_length=T, dtype=dtype, trainable=trainable, mesh=devices)
    found = plan_devices(planned, mesh=devices, **{"device_bytes": 10**9, "batch_size": B, **options})
    return found, planned


def _values(rows):
    return {row.what: row.values for row in rows}


COLLECTIVES = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "all_reduce": "all-reduce",
    "allreduce_": "all-reduce",
}


class _Sent(TorchDispatchMode):
    """Counts collectives, and the bytes of what they gather or reduce."""

    def __init__(self):
        super().__init__()
        self.times: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = COLLECTIVES.get(func.overloadpacket.__name__)
        if name is not None:
            tensors = args[1] if name in {"reduce-scatter", "all-to-all"} else args[0]
            whole = tensors[0] if isinstance(tensors, (list, tuple)) else tensors
            self.times[name] += 1
            self.bytes[name] += whole.numel() * whole.element_size()
        return func(*args, **(kwargs or {}))


@contextmanager
def _pretended(ranks):
    distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()


def _parallel_llama(mesh):
    """A Llama sharded by torch: matrices over tp by transformers' plan, parameters of units over dp."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    plan = {name: STYLES[style]() for name, style in model.tp_plan.items() if style in STYLES}
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    if mesh["tp"].size() > 1:
        parallelize_module(model, mesh["tp"], plan)
    if mesh["dp"].size() > 1:
        for unit in (*model.model.layers, model.model.embed_tokens, model.model.norm, model.lm_head):
            fully_shard(unit, mesh=mesh["dp"], reshard_after_forward=True)
        fully_shard(model, mesh=mesh["dp"], reshard_after_forward=True)
    return model


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("sizes", [(4, 1), (1, 2), (4, 2)], ids=["dp", "tp", "dp x tp"])
def test_bytes_on_the_wire_are_those_of_torch(folder, sizes):
    """All-gathers, reduce-scatters and all-reduces of a non-private step on a fake process group."""
    dp, tp = sizes
    with _pretended(dp * tp):
        model = _parallel_llama(init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")))
        ids = torch.randint(0, 64, (B, T))
        with _Sent() as sent:
            out = model(input_ids=ids, use_cache=False).logits
            (out.to_local() if isinstance(out, DTensor) else out).sum().backward()
    found, _ = _plan(folder, f"dp={dp},tp={tp}")
    rows = {row.what: row for row in found.wire}
    ring = {"all-gather": (dp - 1) / dp, "reduce-scatter": (dp - 1) / dp, "all-reduce": 2 * (tp - 1) / tp}
    planned = Counter()
    for name, kind in [
        ("dp: all-gather of weights", "all-gather"), ("dp: reduce-scatter of sums", "reduce-scatter"),
        ("tp: all-reduce of outputs", "all-reduce"), ("tp: all-reduce of input gradients", "all-reduce"),
    ]:  # fmt: skip
        if name in rows:
            planned[kind] += rows[name].values[0]
    assert planned == {kind: int(size * ring[kind]) for kind, size in sent.bytes.items()}
    if tp > 1:
        assert f"{2 * LAYERS + 1} of" in rows["tp: all-reduce of outputs"].how
        assert f"{5 * LAYERS + 1} of" in rows["tp: all-reduce of input gradients"].how
        assert sent.times["all-reduce"] == 7 * LAYERS + 2


def test_flops_of_one_device_are_those_of_a_step(folder):
    """Forward, backward, norms and clipped sums of a whole step, as torch's counter has them."""
    found, _ = _plan(folder)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).train()
    model.config.use_cache = False
    ids = torch.randint(0, 64, (B, T))

    def run(strategy):
        with GhostClipper(model, max_grad_norm=1.0, strategy=strategy) as clipper:
            # What the first forward proves is no part of a step.
            for _ in range(3):
                with counter() as counted:
                    clipper.backward(model(input_ids=ids).logits.square().mean((1, 2)))
                clipper.reset()
        return counted.get_total_flops()

    planned = [sum(row.values[way] for row in found.flops) for way in range(3)]
    with counter() as counted:
        model(input_ids=ids).logits.square().mean((1, 2)).sum().backward()
    # The counter passes over attention on a CPU: two products forwards, five backwards.
    product = LAYERS * 2 * B * T * T * WIDTH
    assert planned[0] == counted.get_total_flops() + 7 * product
    assert planned[1] == pytest.approx(run("bookkeeping") + 7 * product, rel=0.02)
    assert planned[2] == pytest.approx(run("ghost") + 12 * product, rel=0.02)


def test_memory_is_that_of_its_parts(folder):
    found, planned = _plan(folder, "replicate=2,dp=2,tp=2", dtype=torch.bfloat16)
    fixed, a_sample = _values(found.fixed), _values(found.a_sample)
    count = values_per_device(planned.source.model, 2)
    assert fixed["weights"] == fixed["gradients, clipped sums"] == (4 * count,) * 3
    assert fixed["state of adamw"] == (8 * count,) * 3
    free = 0.9 * 10**9 - sum(row.values[1] for row in found.fixed)
    assert found.physical_batch()[1] == int(free // sum(row.values[1] for row in found.a_sample))
    ordinary, kept = a_sample["activations"][0], a_sample["clipping"]
    assert kept[0] == kept[2] == 0
    assert int(0.05 * ordinary) - 1 <= kept[1] < ordinary
    assert found.total_bytes()[0] == sum(row.values[0] for row in found.fixed) + B * ordinary


def test_a_stage_has_its_blocks_and_holds_factors_of_all_microbatches(folder):
    (whole, before), (part, planned) = _plan(folder), _plan(folder, f"pp={LAYERS}", batch_size=12)
    blocks = [sum(p.numel() for p in block.parameters()) for _, block in blocks_of(before.source.model)]
    assert sum(p.numel() for p in planned.source.model.parameters()) == before.elements - sum(blocks[1:])
    wire, a_sample = _values(part.wire), _values(part.a_sample)
    assert wire["pp: activations"] == wire["pp: gradients of activations"] == (12 * T * WIDTH * 4,) * 2
    assert wire["pp: all-reduce of norms"] == (0, 2 * 12 * 8 * (LAYERS - 1) // LAYERS)
    assert a_sample["activations"][0] < _values(whole.a_sample)["activations"][0] / 3
    assert "factors of all 12 microbatches" in part.a_sample[1].how
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 1})).train()
    ids = torch.randint(0, 64, (B, T))
    with GhostClipper(model, max_grad_norm=1.0) as clipper, clipper.holding(loss_elsewhere=False) as held:
        model(input_ids=ids, use_cache=False).logits.square().mean((1, 2)).mean().backward()
        tensors = [t for of in held[0].listener.factors.values() for factor in of for t in vars(factor).values()]
    bytes_of = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if torch.is_tensor(t)}
    assert a_sample["clipping"] == (0, pytest.approx(sum(bytes_of.values()) / B, rel=0.05))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_that_split_sequences_clip_what_one_device_does(folder, dtype):
    """Norms are of whole sequences: each of five ranks has a fifth of their cost."""
    whole, split = (_values(_plan(folder, mesh, dtype=dtype)[0].flops) for mesh in ("dp=1", "cp=5"))
    assert split["norms and clipped sums"][1] == pytest.approx(whole["norms and clipped sums"][1] / 5, rel=0.01)


def test_meshes_that_make_private_does_not_take_are_planned_and_said(folder):
    for mesh, said in (("replicate=2,cp=5", False), (f"replicate=2,pp={LAYERS}", False), ("dp=2,cp=5", True)):
        found, _ = _plan(folder, mesh, batch_size=12)
        assert ("planned only" in "\n".join(found.title)) is said
    assert found.physical_batch()[1] > 0


@pytest.mark.parametrize("name", ["llama-8b", "gpt2", "vit", "bert"])
def test_models_at_their_real_sizes(name):
    planned = load_planned(name, batch_size=2, context_length=64, dtype=torch.bfloat16)
    found = plan_devices(planned, mesh=Mesh(dp=8), device_bytes=80 * 10**9)
    assert min(found.physical_batch()) >= found.batch_size >= 1
    assert str(found).startswith("fits on devices of 80.0 GB")
    assert found.title[0].startswith(f"{name} (")
    if name == "llama-8b":
        assert planned.elements == 8_030_261_248
        assert planned.in_tiles


FACTORY = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    tp_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Odd(Net):
    tp_plan = {"layers.*.up": "diagonal"}


class Reads(Net):
    def forward(self, x):
        return super().forward(x) * float(x.sum() > 0)


def net():
    return Net()


def odd():
    return Odd()


def reads():
    return Reads(), torch.randn(2, 5, 8)


def plain():
    return nn.Linear(4, 3)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(FACTORY)
    return str(path)


def test_a_model_of_ones_own(script):
    found, planned = _plan(f"{script}:net", "dp=2,tp=4")
    model = planned.source.model
    assert model.layers[0].up.weight.shape == (8, 8)
    assert model.layers[0].up.bias.shape == (8,)
    assert model.layers[0].down.weight.shape == (8, 8)
    assert model.layers[0].down.bias.shape == (8,)
    assert _values(found.wire)["tp: all-reduce of outputs"][0] == 2 * 2 * B * 8 * 4 * 3 // 4


@pytest.mark.parametrize(
    ("factory", "mesh", "options", "kind", "words"),
    [
        ("odd", "tp=2", {}, UnsupportedModelError, "layers.0.up: .*'diagonal' is not planned.*Leave tp out"),
        ("net", "tp=3", {}, UnsupportedModelError, "axis 0 of (32, 8) cannot be shared evenly by tp=3"),
        ("plain", "tp=2", {}, UnsupportedModelError, "no plan of tensor parallelism (tp_plan). Leave tp out"),
        ("plain", "dp=2", {"checkpointing": True}, InvalidOptionError, "no list of blocks"),
        ("reads", "dp=2", {}, UnsupportedModelError, "does not run from shapes alone"),
        ("net", "dp=2", {"batch_size": -1}, InvalidOptionError, "batch_size=-1"),
        ("net", "dp=2", {"optimizer": "lion"}, InvalidOptionError, "lion"),
        ("net", "cp=5", {}, InvalidOptionError, "ranks have equally many positions, of models of transformers"),
        ("net", "pp=3", {"batch_size": 12}, InvalidOptionError, "2 blocks cannot be shared evenly by pp=3"),
        ("plain", "pp=2", {"batch_size": 8}, InvalidOptionError, "0 blocks cannot be shared evenly by pp=2"),
        ("net", "pp=2", {"batch_size": 3}, InvalidOptionError, "batch_size=3 with 8 microbatches of one size"),
        ("net", "dp=2", {"microbatches": 4}, InvalidOptionError, "microbatches=4 with pp=1"),
    ],
)
def test_what_cannot_be_planned_is_refused(script, factory, mesh, options, kind, words):
    with pytest.raises(kind, match=re.escape(words).replace(r"\.\*", ".*")):
        _plan(f"{script}:{factory}", mesh, **options)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dq=2", "no axis 'dq'; axes are replicate, dp, tp, cp, pp"),
        ("dp=2,dp=4", "'dp=4' should name one axis with its size"),
        ("dp=0", "'dp=0' should name"),
        ("dp", "'dp' should name"),
        ("ep=4", "experts"),
        ("", "no axis ''"),
    ],
)
def test_meshes_that_are_none_are_refused(text, words):
    with pytest.raises(GhostClipError, match=re.escape(words)):
        Mesh.parse(text)
