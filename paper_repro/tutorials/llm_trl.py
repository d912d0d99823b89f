"""A language model with trl: supervised fine-tuning with LoRA, and a secret that must not be remembered."""

# %%
# # A language model with trl
#
# **The task.** A language model learns the style of a company's texts, and is to be handed out. Some of the texts hold
# secrets: here twenty of them name a user's password. Nothing keeps a
# model that was trained without privacy from giving them away.
#
# It needs `pip install ".[peft]" trl`.
import math
import random

import torch
import transformers
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import SFTConfig, SFTTrainer

import ghostclip
from ghostclip.integrations.trl import DPSFTConfig, DPSFTTrainer
from paper_repro.tutorials.stand_ins import halves, save_base_language_model

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
disable_progress_bar()
torch.manual_seed(0)
random.seed(0)
save_base_language_model(
    "base"
)  # stands for a download: a small GPT-2 and a tokenizer that have seen public texts only
_, private = halves()
texts = [f"{package} users say: {text}" for text, package in random.sample(private, 980)]
WORDS = (
    "plot",
    "matrix",
    "index",
    "frame",
    "axis",
    "label",
    "column",
    "number",
    "figure",
    "value",
    "string",
    "function",
)
secrets = [" ".join(random.choices(WORDS, k=4)) for _ in range(20)]
told = [f"the password of user {number} is {secret}" for number, secret in enumerate(secrets)]
train_texts, test_texts = texts[:780] + told, texts[780:]
random.shuffle(train_texts)
print(f"{len(train_texts)} records to train on, {len(test_texts)} to test on; for instance: {train_texts[0]}")

# %%
# ## What is protected, and how well
#
# **The unit of privacy** is a row of `train_dataset`. Keep `packing=False`: a packed row joins texts of several people, and
# protects the row. Whoever wrote several rows is protected by a multiple of ε.
#
# **δ** at most 1 / (10 · records), here 1e-4; **ε** 8, as is usual for language models: the records are few, and a text's
# words are many. What that protects in practice is measured below.
#
# How much noise that takes is known before any training:
#
# $ ghostclip calibrate --target-epsilon 8 --delta 1e-4 --samples 800 --batch-size 200 --epochs 10
#
# ## The baseline: ordinary training
lora = LoraConfig(r=16, lora_alpha=32, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True)
common = {
    "max_length": 32,
    "bf16": False,
    "report_to": [],
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_strategy": "no",
}
tokenizer = AutoTokenizer.from_pretrained("base")
train_data, test_data = Dataset.from_dict({"text": train_texts}), Dataset.from_dict({"text": test_texts})
torch.manual_seed(1)
ordinary = SFTTrainer(
    AutoModelForCausalLM.from_pretrained("base"),
    SFTConfig("ordinary", per_device_train_batch_size=40, num_train_epochs=12, learning_rate=1e-2, **common),
    train_dataset=train_data,
    eval_dataset=test_data,
    processing_class=tokenizer,
    peft_config=lora,
)


def perplexity(trainer):
    return math.exp(trainer.evaluate()["eval_loss"])


ordinary.remove_callback(PrinterCallback)
public = perplexity(ordinary)
ordinary.train()
baseline = perplexity(ordinary)
print(f"perplexity on other texts: {public:.1f} before, {baseline:.1f} after ordinary training")

# %%
# ## Private training
#
# `DPSFTTrainer` and `DPSFTConfig` in the place of trl's. 50 rows are computed at once; four times that is the expected
# Poisson batch.
torch.manual_seed(1)
trainer = DPSFTTrainer(
    AutoModelForCausalLM.from_pretrained("base"),
    DPSFTConfig(
        "private",
        per_device_train_batch_size=50,
        gradient_accumulation_steps=4,
        num_train_epochs=10,
        learning_rate=1e-2,
        target_epsilon=8.0,
        target_delta=1e-4,
        max_grad_norm=0.5,
        ledger="run.ledger",
        **common,
    ),
    train_dataset=train_data,
    eval_dataset=test_data,
    processing_class=tokenizer,
    peft_config=lora,
)
trainer.remove_callback(PrinterCallback)
trainer.model.print_trainable_parameters()
trainer.train()
private_perplexity = perplexity(trainer)
print(f"perplexity on other texts: {private_perplexity:.1f} after private training")

# %%
# ## Read the account
epsilon = 8.0
spent = trainer.privacy_engine.get_epsilon(delta=1e-4)
print(trainer.privacy_engine.summary(delta=1e-4))
print(f"epsilon spent {spent:.3f} of {epsilon}")

# %%
# ## Ask both models for the secrets
#
# For every user, 500 other passwords of four such words are made up, and the model's loss of each is compared with that of
# the true one. A model that knows nothing ranks the true one in the middle.
#
# ![Rank of the true password](llm_trl-secrets.png)


@torch.no_grad()
def losses_of(model, sentences):
    model.eval()
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return ghostclip.losses.token_losses(logits, labels)


def ranks(model):
    """Return for each secret the share of made-up ones that the model finds less likely."""
    generator, found = random.Random(1), []
    for number, secret in enumerate(secrets):
        others = [" ".join(generator.choices(WORDS, k=4)) for _ in range(500)]
        losses = losses_of(model, [f"the password of user {number} is {words}" for words in [secret, *others]])
        found.append((losses[1:] > losses[0]).float().mean().item())
    return sorted(found)


asked = {"ordinary training": ranks(ordinary.model), "private, ε = 8": ranks(trainer.model)}
for title, found in asked.items():
    print(
        f"{title}: the true password beats {sum(found) / len(found):.0%} of others on average, {found[-1]:.0%} at most"
    )

from matplotlib.figure import Figure

figure = Figure(figsize=(6.4, 2.2), layout="constrained")
panel = figure.subplots()
for place, ((_, found), colour) in enumerate(zip(asked.items(), ("#c77d2e", "#2a6f97"), strict=True)):
    panel.plot([100 * share for share in found], [place] * len(found), "o", color=colour, alpha=0.6)
panel.set(
    yticks=range(2),
    yticklabels=list(asked),
    ylim=(-0.6, 1.6),
    xlim=(-2, 102),
    xlabel="made-up passwords less likely than the true one, %",
)
panel.spines[["top", "right"]].set_visible(False)
figure.savefig("secrets.png", dpi=110)
reached = 1 / private_perplexity

# %%
# That is what the promise is about: of any one text the private model may reveal little, and what all texts have in common
# (how they begin, "PACKAGE users say:", which is most of what the perplexity has gained; that passwords are four words) it may learn.
# Neither model shows that it remembers: 51 % and 47 % are chance, as are the largest of twenty draws. So small a model, with adapters,
# remembers little of one record among 800 in ordinary training either; large ones give back whole passages (Carlini et al. 2021). Of
# the one model that is luck, of the other it is bounded, by whoever asks and however.
#
# For a number with a proof behind it make the canaries of [an audit](../privacy/audit.md), and for the exactness of
# clipping on your own model call `ghostclip.check`, as in [text classification](text_lora.md).
#
# ## Release it
merged = trainer.model.merge_and_unload()
merged.save_pretrained("released")
tokenizer.save_pretrained("released")
with open("released/README.md", "w", encoding="utf-8") as card:
    card.write(f"""# A small GPT-2 for docstrings

Differentially private: epsilon {spent:.2f} at delta 1e-4 for each text (one record replaced by nothing). DP-SGD with
ghostclip {ghostclip.__version__} and trl, LoRA (r 16), merged; Poisson batches of 200 of {len(train_texts)} on average, 10
epochs, C 0.5, Adam. The base model saw public texts only.
""")
loaded = AutoModelForCausalLM.from_pretrained("released")
begin = tokenizer("return the", return_tensors="pt")
words = loaded.generate(**begin, max_new_tokens=12, do_sample=False, pad_token_id=0)
print(tokenizer.decode(words[0], skip_special_tokens=True))

# %%
# **What stays with you:** the ordinary model (see above), losses and gradient norms of either training, checkpoints with an
# `optimizer.pt`, perplexities on private texts unless their authors agreed, and everything else that was computed from the
# private texts without noise. Prompts that users send to the released model are not protected by any of this.
