"""Every kind of fine-tuning: the first clipped sum is that of single samples, and one sample moves it by C at most.

A resumed run is the run that would have been, and what is written can be loaded.
"""

from __future__ import annotations

import copy
import json
import random
import re
import signal
from dataclasses import replace

import pytest
import torch

from ghostclip.finetune import FinetuneOptions
from ghostclip.finetune.models import Ranks
from ghostclip.finetune.samples import TokenEncoder, byte_tokens, read_samples
from tests.cli.conftest import TINY_GIVEN, assert_refused

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
safetensors = pytest.importorskip("safetensors.torch")
pytest.importorskip("accelerate")

from ghostclip.finetune.run import FinetuneRun  # noqa: E402
from ghostclip.finetune.training import FinetuneTrainer, training_arguments  # noqa: E402

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:noise_multiplier=0:UserWarning"),
    # peft looks at a name that transformers is about to drop.
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]

WORDS = ["the", "film", "was", "good", "bad", "great", "awful", "plot", "actor", "very", "quite", "and", "but", "not"]
C = 0.05
KINDS = {
    "text": {},
    "text-lora": {"lora": 3},
    "answers": {"task": "answers"},
    "answers-lora": {"task": "answers", "lora": 3},
    "classify": {"task": "classify"},
    "classify-lora": {"task": "classify", "lora": 3, "labels": "neg,pos"},
    "classify-bert": {"task": "classify", "model": "bert"},
    "classify-toy": {"task": "classify", "model": None, "layers": 1, "hidden_size": 18, "heads": 3},
}


@pytest.fixture(scope="session")
def given(tmp_path_factory):
    """A folder with small pretrained models, each with its tokenizer, and a table for every task."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("given")
    vocabulary = {word: number for number, word in enumerate(["[UNK]", "[END]", "[PAD]", *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="[END]", unk_token="[UNK]", pad_token="[PAD]"
    )
    sizes = {"vocab_size": 21, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 2}
    gpt2 = transformers.GPT2Config(
        n_embd=12, n_layer=2, n_head=2, n_positions=19, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **sizes
    )
    bert = transformers.BertConfig(
        hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=14, hidden_dropout_prob=0,
        max_position_embeddings=19, attention_probs_dropout_prob=0, **sizes,
    )  # fmt: skip
    torch.manual_seed(1)
    for name, model in (("gpt2", transformers.GPT2LMHeadModel(gpt2)), ("bert", transformers.BertModel(bert))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    chosen = random.Random(3)
    rows = []
    for number in range(40):
        said = [" ".join(chosen.choices(WORDS, k=chosen.randint(2, 9))) for _ in range(2)]
        rows.append({"text": said[0], "prompt": said[0], "answer": said[1], "label": ("neg", "pos")[number % 2]})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def options_of(given, kind, **more):
    chosen = {"model": "gpt2", **KINDS[kind]}
    if chosen["model"] is not None:
        chosen["model"] = str(given / chosen["model"])
    return FinetuneOptions(
        **{
            "data": given / "rows.jsonl", "steps": 3, "batch_size": 9, "physical_batch_size": 4, "max_grad_norm": C,
            "device": "cpu", "seed": 5, "unsafe_noise_seed": 6, **chosen, **more,
        }
    )  # fmt: skip


def words_of(options):
    """The same as words of a command line."""
    names = ("task", "data", "model", "lora", "labels", "layers", "hidden_size", "heads", "seed", "unsafe_noise_seed")
    said = [
        (name, getattr(options, name)) for name in names if getattr(options, name) != getattr(FinetuneOptions, name)
    ]
    return [word for name, value in said for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture
def first_step(given, tmp_path):
    """Take the first step of a kind at σ = 0; give the samples, the model before and what the inner optimizer got."""

    def run(kind, *, emptied=None):
        prepared = FinetuneRun(options_of(given, kind, output=tmp_path / f"out-{emptied}"), None, Ranks())
        torch.manual_seed(8)
        for parameter in prepared.model.parameters():
            # Adapters begin at zero, where half of their gradients vanish.
            parameter.data.add_(0.1 * torch.randn_like(parameter))
        before = copy.deepcopy(prepared.model).double()
        prepared.mechanism = replace(prepared.mechanism, noise_multiplier=0.0, steps=1)
        trainer = FinetuneTrainer(prepared, training_arguments(prepared))
        samples, got, plain = [], {}, trainer._record_losses

        def losses(model, inputs, **options):
            losses_B, outputs = plain(model, inputs, **options)
            if not trainer._computing:
                # The checks before the first step.
                return losses_B, outputs
            samples.extend(zip(*inputs.values(), strict=True))
            here = torch.arange(len(samples) - len(losses_B), len(samples)) != emptied
            return losses_B * here, outputs

        def step(*_):
            for name, parameter in prepared.model.named_parameters():
                if parameter.requires_grad:
                    got[name] = parameter.grad.double() * prepared.mechanism.batch_size

        trainer._record_losses, trainer.optimizer.step = losses, step
        trainer.finish()
        trainer.close()
        return samples, before, got

    return run


def loss_alone(model, ids_T, mask_T, labels, kind):
    """The loss of one sample by transformers' own means, without padding."""
    alone_BT = ids_T[None, mask_T == 1]
    if kind.startswith("classify"):
        return torch.nn.functional.cross_entropy(model(input_ids=alone_BT).logits, labels[None])
    return model(input_ids=alone_BT, labels=labels[None, mask_T == 1]).loss


@pytest.mark.parametrize("kind", KINDS)
def test_first_clipped_sum_is_that_of_single_samples(first_step, kind):
    samples, model, got = first_step(kind)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    expected = {name: torch.zeros_like(parameter) for name, parameter in trained.items()}
    clipped = 0
    for sample in samples:
        grads = torch.autograd.grad(
            loss_alone(model, *sample, kind), list(trained.values()), allow_unused=True, materialize_grads=True
        )
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        clipped += int(norm > C)
        for name, grad in zip(trained, grads, strict=True):
            expected[name] += grad * min(1.0, C / float(norm))
    assert len(samples) > 3
    assert clipped > 0
    assert got.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(
            got[name], grad, rtol=1e-4, atol=2e-5 * C, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("kind", ["text-lora", "answers", "classify-bert"])
def test_one_sample_moves_the_sum_by_c_at_most(first_step, kind):
    _, _, whole = first_step(kind)
    _, _, emptied = first_step(kind, emptied=0)
    moved = torch.stack([(whole[name] - emptied[name]).norm() for name in whole]).norm()
    assert 0.5 * C < moved <= C * (1 + 1e-5)


@pytest.mark.parametrize("kind", ["answers-lora", "classify"])
def test_a_resumed_run_is_the_run_that_would_have_been(finetune, given, tmp_path, record_of, after_step, kind):
    words = [*words_of(options_of(given, kind)), *TINY_GIVEN]
    assert finetune(*words, "--output", tmp_path / "whole").status == 0
    after_step(2, lambda: signal.raise_signal(signal.SIGINT))
    assert finetune(*words, "--output", tmp_path / "parts").status == 130
    resumed = finetune("--resume", "--output", tmp_path / "parts")
    assert resumed.status == 0, resumed.err
    whole, parts = record_of(tmp_path / "whole"), record_of(tmp_path / "parts")
    assert parts["not_private"] == whole["not_private"]
    assert parts["privacy"]["epsilon"] == whole["privacy"]["epsilon"]
    saved = "adapter_model.safetensors" if "lora" in kind else "model.safetensors"
    one, two = (safetensors.load_file(tmp_path / name / saved) for name in ("whole", "parts"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("kind", "loader", "said"),
    [
        ("answers-lora", "peft.AutoPeftModelForCausalLM", "perplexity:"),
        ("classify", "transformers.AutoModelForSequenceClassification", "accuracy:"),
    ],
)
def test_what_is_written_is_loaded(finetune, given, tmp_path, kind, loader, said):
    out = tmp_path / "out"
    result = finetune(*words_of(options_of(given, kind)), *TINY_GIVEN, "--output", out)
    assert result.status == 0, result.err
    text = " ".join(result.out.split())
    assert f"{loader}.from_pretrained loads it" in text
    assert said in text
    assert "Assumed: the initial weights do not depend on this text" in text
    assert "for one row" in text
    closing = text[text.index("Neighbours:") :]
    for once in ("is public", "Poisson", "σ = ", "fast (a statistical generator)", "batch sizes", "rounding or timing"):
        assert closing.count(once) == 1, once
    code = re.search(r"```python\n(.*?)```", (out / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    loaded = {}
    exec(code.group(1).replace('"."', repr(str(out))), loaded)
    model, tokenizer = loaded["model"], loaded["tokenizer"]
    two = tokenizer(["a text", "a longer text of words"], padding=True, return_tensors="pt")
    assert model(input_ids=two["input_ids"], attention_mask=two["attention_mask"]).logits.isfinite().all()
    assert json.loads((out / "private" / "run.json").read_text())["privacy"]["unit"] == "row"
    assert sorted(path.name for path in (out / "private").iterdir()) == ["plot.png", "run.json"]
    if "classify" in kind:
        assert model.config.id2label == {0: "neg", 1: "pos"}
    if kind == "classify":
        assert "the list of labels, which was read from the data" in text


def test_answers_are_what_is_predicted(given):
    options = options_of(given, "answers")
    split = read_samples(options, byte_tokens(), context_length=200, seed=1)
    rows = [json.loads(line) for line in (given / "rows.jsonl").read_text().splitlines()]
    said = {f"{row['prompt']}\n": row["answer"] for row in rows}
    for part in (split.training, split.held_out):
        for ids_T, mask_T, labels_T in (part[number].values() for number in range(len(part))):
            learned = labels_T != -100
            parts = (ids_T[(mask_T == 1) & ~learned], ids_T[learned])
            text = [bytes(int(i) - 3 for i in ids if i >= 3).decode() for ids in parts]
            assert said[text[0]] == text[1]
            assert ids_T[0] == parts[1][-1] == byte_tokens().start_id
            assert (labels_T[learned] == ids_T[learned]).all()


def test_a_chat_template_is_used(given):
    tokenizer = transformers.AutoTokenizer.from_pretrained(given / "gpt2")
    tokenizer.chat_template = (
        "{% for m in messages %}film {{ m['content'] }}{% endfor %}{% if add_generation_prompt %} plot{% endif %}"
    )
    prompt, answer = TokenEncoder(tokenizer, source="").dialogue("good", "bad bad")
    assert tokenizer.convert_ids_to_tokens(prompt.tolist()) == ["film", "good", "plot"]
    assert tokenizer.convert_ids_to_tokens(answer.tolist()) == ["bad", "bad", "[END]"]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--task", "answer"], ["--task is 'answer'", "did you mean 'answers'?"]),
        (["--task", "answers"], ["--data: needed", "prompt, answer"]),
        (["--task", "answers", "--data", "rows.txt"], ["are read from .jsonl, .csv or .tsv"]),
        (["--task", "answers", "--data", "rows.jsonl", "--answer-column", "reply"], ["no column 'reply'"]),
        (["--task", "classify", "--data", "rows.jsonl", "--labels", "neg,poss"], ["label 'pos'", "mean 'poss'?"]),
        (["--task", "classify", "--data", "rows.jsonl", "--labels", "neg"], ["at least two"]),
        (["--task", "classify", "--data", "one.jsonl"], ["every row has the label 'neg'"]),
        (["--task", "answers", "--data", "empty.jsonl"], ["empty.jsonl, line 1: 'answer' is empty"]),
        (["--labels", "a,b"], ["--labels goes with --task classify"]),
        (["--model", "gpt2", "--layers", "3"], ["--layers goes with --toy"]),
        (["--lora", "4"], ["name them with --model"]),
        (["--lora-alpha", "4"], ["--lora-alpha goes with --lora"]),
        (["--model", "gpt2", "--lora", "0"], ["--lora is 0"]),
        (["--model", "gpt2", "--lora", "2", "--lora-targets", "nowhere"], ["--lora-targets", "c_attn, c_proj"]),
        (["--model", "gpt2", "--context-length", "20"], ["--context-length 20", "holds 19 tokens"]),
        (["--model", "plain"], ["--model", "no tokenizer lies in it", "--tokenizer"]),
        (["--model", "rows.jsonl"], ["no Hugging Face model lies here"]),
        (["--tokenizer", "plain"], ["--tokenizer plain: no tokenizer lies in it"]),
        (["--tokenizer", "void.json"], ["void.json: the tokenizer has an empty vocabulary"]),
        (["--model", "gpt2", "--tokenizer", "bytes"], ["its vocabulary has 21 rows, but bytes needs 259"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input(finetune, given, tmp_path, monkeypatch, words, parts):
    monkeypatch.chdir(given)
    (given / "rows.txt").write_text("text")
    (given / "one.jsonl").write_text('{"text": "a", "label": "neg"}\n' * 2)
    (given / "empty.jsonl").write_text('{"prompt": "a", "answer": " "}')
    (given / "void.json").write_text(
        '{"added_tokens": [], "model": {"type": "WordLevel", "vocab": {}, "unk_token": ""}}'
    )
    (given / "plain").mkdir(exist_ok=True)
    (given / "plain" / "config.json").write_text((given / "gpt2" / "config.json").read_text())
    data = [] if "--data" in words or "answers" in words else ["--data", given / "rows.jsonl"]
    result = finetune(*words, *data, *TINY_GIVEN, "--output", tmp_path / "out")
    assert_refused(result, *parts)
    assert not (tmp_path / "out").exists()


def test_a_name_that_cannot_be_fetched_says_so_and_names_the_toy(finetune, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = finetune("--data", text_file, "--model", "gpt2", *TINY_GIVEN, "--output", tmp_path / "out")
    parts = "--model gpt2: no such file or folder", "cache of Hugging Face", "--toy gpt2 for a small one with random"
    assert_refused(result, *parts)
