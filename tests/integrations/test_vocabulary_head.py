"""Causal models of transformers whose loss is computed without logits: as from logits, or refused by name."""

import copy

import pytest
import torch
from torch import nn

from ghostclip import GhostClipper
from ghostclip.errors import UnsupportedModelError
from ghostclip.losses import token_losses

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.integration

from ghostclip import language  # noqa: E402
from ghostclip.language import use_fused, without_logits  # noqa: E402

V = 61
_SIZES = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@pytest.fixture(autouse=True)
def _small_vocabularies_count_as_large(monkeypatch):
    monkeypatch.setattr(language, "LARGE", 0)


def test_a_small_vocabulary_keeps_its_logits_by_itself(monkeypatch):
    monkeypatch.undo()
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=259, n_embd=8, n_layer=1, n_head=1))
    assert not use_fused(model, "auto")
    assert use_fused(model, "fused")


def _gpt2():
    config = transformers.GPT2Config(vocab_size=V, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


def _llama(**given):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES, **given))


def _gemma2():
    config = transformers.Gemma2Config(**_SIZES, head_dim=8, final_logit_softcapping=2.0)
    return transformers.Gemma2ForCausalLM(config)


def _granite():
    return transformers.GraniteForCausalLM(transformers.GraniteConfig(**_SIZES, logits_scaling=3.0))


MODELS = {
    "gpt2": _gpt2,
    "llama": _llama,
    "llama_tied": lambda: _llama(tie_word_embeddings=True),
    "gemma2": _gemma2,
    "granite": _granite,
}


def _made(name):
    torch.manual_seed(0)
    model = MODELS[name]().float().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    ids = torch.randint(V, (4, 9))
    labels = ids.clone()
    labels[1, :5] = -100
    return model, ids, labels


def _sums(model, losses):
    with GhostClipper(model, max_grad_norm=0.5) as clipper:
        clipper.backward(losses())
        norms = clipper.per_sample_norms
    return norms, torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("name", MODELS)
def test_norms_and_sums_are_those_from_logits(name):
    model, ids, labels = _made(name)
    plain, fused = copy.deepcopy(model), copy.deepcopy(model)
    want = _sums(plain, lambda: token_losses(plain(input_ids=ids).logits, labels))
    with without_logits(fused):
        got = _sums(fused, lambda: fused(input_ids=ids, labels=labels).loss)
    for found, expected in zip(got, want, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_output_holds_losses_and_no_logits_and_the_model_is_what_it_was():
    model, ids, labels = _made("gpt2")
    with without_logits(model):
        output = model(input_ids=ids, labels=labels)
        assert output.logits is None
        assert output.loss.shape == (4,)
        assert model(input_ids=ids).logits.shape == (4, 9, V)
    with without_logits(model, reduction="mean"):
        torch.testing.assert_close(model(input_ids=ids, labels=labels).loss, output.loss.mean())
    assert "forward" not in vars(model)
    assert "forward" not in vars(model.lm_head)
    assert model(input_ids=ids, labels=labels).logits is not None


def _scaled():
    """The logits are changed by something that its config does not say."""
    model = _llama()
    whole = model.lm_head.forward
    model.lm_head.forward = lambda hidden: 2 * whole(hidden)
    return model


class _OwnHead(nn.Linear):
    def forward(self, x):
        return super().forward(x).tanh()


def _other_head():
    model = _llama()
    model.lm_head = _OwnHead(16, V, bias=False)
    return model


@pytest.mark.parametrize(
    ("make", "said"),
    [(_scaled, "no linear map"), (_other_head, "its head is a _OwnHead"), (lambda: nn.Linear(3, 3), "names no head")],
)
def test_models_that_do_not_fit_are_computed_from_logits_or_refused_by_name(make, said):
    model = make().eval()
    assert not use_fused(model, "auto")
    with pytest.raises(UnsupportedModelError, match=said):
        use_fused(model, "fused")


def _trained(tmp_path, **given):
    from ghostclip.integrations.transformers import DPTrainer, DPTrainingArguments

    model, _, _ = _made("gpt2")
    records = [{"input_ids": torch.randint(V, (9,)), "labels": torch.randint(V, (9,))} for _ in range(16)]
    arguments = DPTrainingArguments(
        output_dir=str(tmp_path), noise_multiplier=0.0, target_delta=1e-3, max_grad_norm=0.5, max_steps=3,
        per_device_train_batch_size=8, report_to=[], use_cpu=True, save_strategy="no", reproducible_seed=5,
        learning_rate=0.05, optim="sgd", disable_tqdm=True, **given,
    )  # fmt: skip
    torch.manual_seed(1)
    trainer = DPTrainer(model=model, args=arguments, train_dataset=records)
    return trainer, model


@pytest.mark.filterwarnings("ignore")
def test_trainer_computes_losses_without_logits_by_default(tmp_path):
    torch.manual_seed(1)
    results = {}
    for choice in ("auto", "logits"):
        torch.manual_seed(2)
        trainer, model = _trained(tmp_path / choice, vocabulary_head=choice)
        trainer.train()
        assert trainer._is_fused is (choice == "auto")
        results[choice] = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(results["auto"], results["logits"], rtol=1e-4, atol=1e-5)
