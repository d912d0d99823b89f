"""`DPTrainer` with a model that two processes hold in parts, and draws of any expected size: the run of one process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from tests.process_group import process_group, start_ranks

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:.*explicit generator:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*not below 1:UserWarning"),
]

# An expected batch that neither two processes nor parts of two records divide.
GIVEN = {
    "noise_multiplier": 0.5, "target_epsilon": 30.0, "target_delta": 1e-3, "max_grad_norm": 0.1, "max_steps": 3,
    "expected_batch_size": 7, "per_device_train_batch_size": 2, "reproducible_seed": 3, "optim": "adamw_torch",
    "learning_rate": 0.01, "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True,
}  # fmt: skip


def _model(toy):
    torch.manual_seed(1)
    if toy == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=30, n_positions=9, n_embd=12, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        vocab_size=30, hidden_size=12, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=9,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


# Which toy is held in which parts (whole by each process: None), whether the trainer has a compute_loss of its own, and
# further arguments.
RUNS = [
    ("gpt2", "dp=2", True, {"gradient_accumulation_steps": 2}),
    ("llama", "tp=2", False, {}),
    ("gpt2", None, False, {"torch_compile": True, "torch_compile_backend": "eager"}),
]


def _trainer(*, own_loss):
    from ghostclip.integrations.transformers import DPTrainer

    class OwnLoss(DPTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(input_ids=inputs["input_ids"])
            scores, labels = outputs.logits[:, :-1].transpose(1, 2), inputs["labels"][:, 1:]
            loss = torch.nn.functional.cross_entropy(scores, labels)
            return (loss, outputs) if return_outputs else loss

    return OwnLoss if own_loss else DPTrainer


def _trained(folder, toy, mesh, *, own_loss=False, options=None):
    from ghostclip.integrations.transformers import DPTrainingArguments

    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(30, (9,), generator=generator) for _ in range(24)]
    records = [{"input_ids": row, "labels": row} for row in ids]
    model = _model(toy)
    if mesh is not None:
        from ghostclip.finetune.models import divide
        from ghostclip.scaling import Mesh

        divide(model, Mesh.parse(mesh), torch.device("cpu"))
    arguments = DPTrainingArguments(output_dir=str(folder), **GIVEN, **(options or {}))
    trainer = _trainer(own_loss=own_loss)(model, arguments, train_dataset=records)
    said = trainer.train().metrics
    state = model.state_dict()
    if mesh is not None:
        from ghostclip.distributed.weights import gathered_whole

        state = gathered_whole(state)
    return {"weights": dict(state), "loss": said["train_loss"], "epsilon": said["epsilon"]}


def _rank(rank, ranks, folder):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    with process_group(rank, ranks, folder, meshes=True):
        found = [
            _trained(Path(folder), toy, mesh, own_loss=own_loss, options=options)
            for toy, mesh, own_loss, options in RUNS
        ]
        if rank == 0:
            torch.save(found, Path(folder) / "found.pt")
    sys.stdout.flush()
    os._exit(0)


def test_a_model_in_parts_is_trained_as_a_whole_one(tmp_path):
    start_ranks(_rank, 2, str(tmp_path))
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    for run, in_parts in zip(RUNS, found, strict=True):
        alone = _trained(tmp_path, run[0], None, options=run[3])
        assert in_parts["epsilon"] == alone["epsilon"]
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(in_parts["weights"][name], weight, rtol=1e-5, atol=1e-6, msg=f"{run} {name}")


def test_an_expected_batch_is_at_most_all_records(tmp_path, monkeypatch):
    from ghostclip.errors import DataError

    monkeypatch.setitem(GIVEN, "expected_batch_size", 25)
    with pytest.raises(DataError, match="expected_batch_size=25, of 24 records"):
        _trained(tmp_path, "gpt2", None)
