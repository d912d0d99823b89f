"""`make_private(vocabulary_head=)`: losses of records from a language model's own forward, exact and without logits."""

import pytest
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import ghostclip
from ghostclip.errors import UnsupportedModelError
from tests.reference import clip_and_sum, per_sample_gradients, take, whole_norm

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.integration

B, T, V = 4, 6, 29
TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _llama():
    config = transformers.LlamaConfig(vocab_size=V, num_key_value_heads=2, tie_word_embeddings=False, **TINY)
    return transformers.LlamaForCausalLM(config)


def _bert(**given):
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=V, **TINY, **STILL, **given))


def _t5(**given):
    config = transformers.T5Config(vocab_size=V, decoder_start_token_id=0, **T5, **given)
    return transformers.T5ForConditionalGeneration(config)


def _bart():
    sizes = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in (("layers", 1), ("ffn_dim", 16))}
    heads = {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
    config = transformers.BartConfig(
        vocab_size=V, d_model=16, dropout=0.0, max_position_embeddings=16, **sizes, **heads
    )
    model = transformers.BartForConditionalGeneration(config)
    model.final_logits_bias.normal_()
    return model


MODELS = {
    "llama": _llama,
    "bert, tied": _bert,
    "t5": lambda: _t5(tie_word_embeddings=False),
    "bart, tied, biased": _bart,
}


def _made(name):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def _batch():
    """Records that count different numbers of tokens."""
    drawn = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(3, V, (B, T), generator=drawn) for _ in range(2))
    for sample, count in enumerate((6, 3, 4, 2)):
        labels[sample, count:] = -100
    return {"input_ids": ids, "labels": labels}


class _Receiver(torch.optim.SGD):
    """Keeps what it is given."""

    def step(self, closure=None):
        self.received = {id(p): p.grad.clone() for group in self.param_groups for p in group["params"]}
        return super().step(closure)


def _private(model, choice, *, bound=1.0, **given):
    inner = _Receiver(model.parameters(), lr=0.0)
    own = ghostclip.DeclaredSampling(sample_rate=0.1, expected_batch_size=1, num_units=1000)
    private, optimizer, *_ = ghostclip.PrivacyEngine().make_private(
        module=model, optimizer=inner, data_loader=own, noise_multiplier=0.0, max_grad_norm=bound,
        vocabulary_head=choice, **given,
    )  # fmt: skip
    return private, optimizer, inner


def _released(private, optimizer, inner, batch):
    private(**batch).loss.mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {name: inner.received[id(p)] for name, p in private._module.named_parameters()}


def _alone(model, batch):
    """The loss of one record as the model itself computes it, in 64 bits."""
    scores, labels = model(**batch).logits, batch["labels"]
    if type(model).__name__.endswith("CausalLM") or isinstance(model, transformers.GPT2LMHeadModel):
        scores, labels = scores[:, :-1], labels[:, 1:]
    return functional.cross_entropy(scores.flatten(0, 1), labels.flatten()).unsqueeze(0)


@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
@pytest.mark.parametrize("choice", ["fused", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_released_sum_is_exact_and_moves_by_c_at_most(name, choice):
    model, batch = _made(name), _batch()
    wanted = clip_and_sum(per_sample_gradients(model, batch, _alone, axes={}))
    made = _private(model, choice, bound=wanted.max_grad_norm)
    whole = _released(*made, batch)
    for key, value in wanted.clipped.items():
        torch.testing.assert_close(whole[key], value, rtol=1e-8, atol=1e-10)
    for sample in range(B):
        rest = _released(*made, take(batch, [other for other in range(B) if other != sample], {}))
        moved = whole_norm({key: whole[key] - rest[key] for key in whole})
        assert moved <= wanted.max_grad_norm * (1 + 1e-6)  # norms of some models are formed in 32 bits


class _Largest(TorchFunctionMode):
    """Watches for scores of all words at all positions."""

    def __init__(self):
        super().__init__()
        self.seen = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.seen |= isinstance(made, torch.Tensor) and tuple(made.shape) == (B, T, V)
        return made


@pytest.mark.parametrize(("choice", "stored"), [("fused", False), ("auto", True), ("logits", True)])
@pytest.mark.parametrize("name", MODELS)
def test_scores_are_stored_where_they_are_wanted(name, choice, stored):
    private, _, _ = _private(_made(name), choice)
    with _Largest() as largest:
        output = private(**_batch())
    assert largest.seen is stored
    assert (output.logits is not None) is stored
    assert output.loss.shape == (() if choice == "logits" else (B,))


def test_other_forwards_and_the_model_itself_are_what_they_were():
    model, batch = _made("llama"), _batch()
    own = model(**batch).loss.detach()
    private, _, _ = _private(model, "fused")
    assert private(input_ids=batch["input_ids"]).logits.shape == (B, T, V)
    with torch.no_grad():
        torch.testing.assert_close(private(**batch).loss, own)
    private.eval()
    assert private(**batch).logits.shape == (B, T, V)
    torch.testing.assert_close(private.to_standard_module()(**batch).loss, own)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("mode", ["hooks", "graph"])
def test_strategies_that_need_scores(mode):
    given = {"grad_sample_mode": mode, "criterion": lambda output: output.loss if mode == "graph" else None}
    given["criterion"].reduction = "mean"
    with pytest.raises(UnsupportedModelError, match="logits are needed"):
        _private(_made("llama"), "fused", **given)
    _private(_made("llama"), "auto", **given)


def _balanced():
    """Its loss is more than that of its tokens."""
    config = transformers.MixtralConfig(
        vocab_size=V, num_key_value_heads=2, num_local_experts=2, output_router_logits=True, **TINY
    )
    return transformers.MixtralForCausalLM(config)


class _Twice(transformers.GPT2LMHeadModel):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        if output.loss is not None:
            output.loss = 2 * output.loss
        return output


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.nn.Linear(3, 3), "no causal, masked or sequence-to-sequence"),
        (lambda: transformers.BertForTokenClassification(transformers.BertConfig(vocab_size=V, **TINY)), "no causal"),
        (
            lambda: _Twice(transformers.GPT2Config(vocab_size=V, n_embd=16, n_layer=1, n_head=2)),
            "another than the mean",
        ),
        (_balanced, "another than the mean"),
    ],
    ids=["linear", "tokens", "another loss", "balanced"],
)
def test_what_does_not_fit_is_left_alone_or_refused_by_name(make, said):
    model = make()
    assert _private(model, "auto")[0].__dict__["around"] is None
    with pytest.raises(UnsupportedModelError, match=said):
        _private(make(), "fused")
