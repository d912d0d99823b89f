"""Losses as transformers' models and trl's trainers compute them, through a plain backward."""

import pytest
import torch

import ghostclip
from ghostclip.clipping.loss import LossExaminer
from ghostclip.errors import LossReductionError
from tests.reference import clip_and_sum, per_sample_gradients, take, whole_norm

transformers = pytest.importorskip("transformers")
B, T, V = 4, 6, 32
TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def _causal():
    config = transformers.LlamaConfig(vocab_size=V, num_key_value_heads=2, **TINY)
    return transformers.LlamaForCausalLM(config)


def _masked():
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=V, **TINY))


def _classifier():
    return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=V, num_labels=3, **TINY))


def _seq2seq():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=V, decoder_start_token_id=0, dropout_rate=0.0, **sizes)
    )


def _made(make):
    torch.manual_seed(0)
    return make().double().eval()


def _batch(counts):
    ids = torch.randint(1, V, (B, T), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    for sample, count in enumerate(counts):
        labels[sample, count:] = -100
    return {"input_ids": ids, "labels": labels}


def _own(model, batch):
    return model(**batch).loss


def _by_number(model, batch):
    """As Trainer hands it over; shifted labels leave out the first position."""
    return model(**batch, num_items_in_batch=int((batch["labels"][:, 1:] != -100).sum())).loss


def _by_tensor(model, batch):
    return model(**batch, num_items_in_batch=(batch["labels"][:, 1:] != -100).sum()).loss


def _by_each(model, batch):
    return ghostclip.losses.token_losses(model(batch["input_ids"]).logits, batch["labels"]).mean()


def _class(model, batch):
    return model(batch["input_ids"], labels=batch["input_ids"][:, 0] % 3).loss


def _sft(model, batch):
    """What trl's SFTTrainer does with the log-probabilities of the labels."""
    logits, labels = model(batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    log_probs = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    counted = labels != -100
    return (-log_probs * counted).sum() / counted.sum().clamp(min=1)


def _smoothed(model, batch):
    smoother = transformers.trainer_pt_utils.LabelSmoother(epsilon=0.1)
    return smoother({"logits": model(batch["input_ids"]).logits}, batch["labels"], shift_labels=True)


FULL, SHORT = (T,) * B, (6, 2, 4, 2)
ACCEPTED = [
    (_causal, _own, FULL),
    (_causal, _by_number, FULL),
    (_causal, _by_tensor, FULL),
    (_causal, _by_each, FULL),
    (_causal, _by_each, SHORT),
    (_causal, _sft, FULL),
    (_masked, _own, (3,) * B),
    (_classifier, _class, SHORT),
    (_seq2seq, _own, FULL),
]
REFUSED = [
    (_causal, _own, SHORT),
    (_causal, _by_number, SHORT),
    (_causal, _by_tensor, SHORT),
    (_causal, _sft, SHORT),
    (_causal, _smoothed, SHORT),
    (_masked, _own, SHORT),
    (_seq2seq, _own, SHORT),
]


def _names(case):
    return f"{case[0].__name__}-{case[1].__name__}-{sum(case[2])}"


def _sums(model, loss, batch):
    model.zero_grad(set_to_none=True)
    loss(model, batch).backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def _largest_move(model, loss, batch, clipper):
    whole, found = _sums(model, loss, batch), []
    for sample in range(B):
        rest = _sums(model, loss, take(batch, [index for index in range(B) if index != sample], {}))
        found.append(whole_norm({name: whole[name] - rest[name] for name in whole}).item() / clipper.max_grad_norm)
    return max(found)


@pytest.mark.parametrize("case", ACCEPTED, ids=_names)
def test_accepted(case):
    make, loss, counts = case
    batch = _batch(counts)
    per_sample = per_sample_gradients(_made(make), batch, lambda m, b: loss(m, b).unsqueeze(0), axes={})
    wanted = clip_and_sum(per_sample)
    model = _made(make)
    with ghostclip.GhostClipper(model, max_grad_norm=wanted.max_grad_norm) as clipper:
        got = _sums(model, loss, batch)
        for name, value in wanted.clipped.items():
            torch.testing.assert_close(got[name], value, rtol=1e-8, atol=1e-10)
        assert _largest_move(model, loss, batch, clipper) <= 1 + 1e-6


@pytest.mark.parametrize("case", REFUSED, ids=_names)
def test_refused_and_why(case, monkeypatch):
    make, loss, counts = case
    model, batch = _made(make), _batch(counts)
    with ghostclip.GhostClipper(model, max_grad_norm=1.0):
        with pytest.raises(LossReductionError, match="token_losses"):
            loss(model, batch).backward()
        assert all(p.grad is None for p in model.parameters())
    monkeypatch.setattr(LossExaminer, "examine", lambda *_: None)
    with ghostclip.GhostClipper(model, max_grad_norm=1e9) as clipper:
        clipper._evidence.loop.is_on = False
        _sums(model, loss, batch)
        clipper.max_grad_norm = clipper.per_sample_norms.max().item()
        assert _largest_move(model, loss, batch, clipper) > 1 + 1e-3
