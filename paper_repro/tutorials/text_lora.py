"""Text classification with LoRA: transformers' Trainer, made private."""

# %%
# # Classify text with LoRA
#
# **The task.** A support desk sorts questions by the product they are about. The texts were written by customers, and the
# classifier is to be shared: whoever has it must not be able to find out what one of them wrote. The texts here, so that
# nothing is downloaded, are sentences of docstrings, and the products are the four packages that they are from.
#
# It needs `pip install ".[peft]"`.
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PrinterCallback, Trainer, TrainingArguments

import ghostclip
from ghostclip.integrations.transformers import DPTrainer, DPTrainingArguments
from paper_repro.tutorials.stand_ins import PACKAGES, halves, save_base_classifier

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.manual_seed(0)
save_base_classifier("base")  # stands for a download: a small BERT and a tokenizer that have seen public texts only
_, texts = halves()
print(f"{len(texts)} private texts, for instance: {texts[7]}")

# %%
# The tokenizer is the base model's. A vocabulary that is made from the private texts would be a statistic of them, with no
# noise on it. Every text gets the same length here; a collator that pads with a mask does as well.
tokenizer = AutoTokenizer.from_pretrained("base")
encoded = tokenizer([text for text, _ in texts], padding="max_length", truncation=True)
records = [
    {"input_ids": ids, "attention_mask": mask, "labels": PACKAGES.index(package)}
    for ids, mask, (_, package) in zip(encoded["input_ids"], encoded["attention_mask"], texts, strict=True)
]
order = torch.randperm(len(records)).tolist()
test, train = [records[number] for number in order[:1000]], [records[number] for number in order[1000:]]
print(f"{len(train)} records to train on, {len(test)} to test on")


def adapted():
    """Return the base model with a new head and LoRA: what is trained is both, and few numbers."""
    torch.manual_seed(1)
    base = AutoModelForSequenceClassification.from_pretrained(
        "base", num_labels=len(PACKAGES), ignore_mismatched_sizes=True
    )
    return get_peft_model(
        base, LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"], modules_to_save=["classifier"])
    )


adapted().print_trainable_parameters()

# %%
# ## What is protected, and how well
#
# **The unit of privacy** is an entry of `train_dataset`, here one text. Customers who wrote ten texts are protected by a
# multiple of ε only: join what one person wrote into one record, or keep one text of each.
#
# **δ** at most 1 / (10 · records), here 1e-5; **ε** 3, for the whole training.
#
# How much noise that takes is known before any training:
#
# $ ghostclip calibrate --target-epsilon 3 --delta 1e-5 --samples 5000 --batch-size 500 --epochs 6
#
# ## The baseline: ordinary training
#
# The same adapters, ordinary `Trainer`, small batches.
quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no"}


def right(predicted):
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


ordinary = Trainer(
    adapted(),
    TrainingArguments(
        "ordinary",
        per_device_train_batch_size=50,
        num_train_epochs=3,
        learning_rate=5e-3,
        logging_strategy="no",
        **quiet,
    ),
    train_dataset=train,
    eval_dataset=test,
    compute_metrics=right,
)
ordinary.remove_callback(PrinterCallback)
before = ordinary.evaluate()["eval_accuracy"]
ordinary.train()
baseline = ordinary.evaluate()["eval_accuracy"]
print(f"test accuracy before any training {before:.3f}, after ordinary training {baseline:.3f}")

# %%
# ## Check the model before it becomes private
#
# Dummy records of the same shape will do. The report compares the clipped sum with one record at a time, and lists
# trainable parameters that receive no gradient: adapters that are switched off, say.
dummy = {"input_ids": torch.randint(4, 1000, (4, 16)), "attention_mask": torch.ones(4, 16, dtype=torch.long)}
answers = torch.randint(4, (4,))


def losses(model, batch):
    return torch.nn.functional.cross_entropy(model(**batch[0]).logits, batch[1], reduction="none")


print(ghostclip.check(adapted(), (dummy, answers), losses))

# %%
# ## Private training
#
# `DPTrainer` in the place of `Trainer`. What is computed at once (`per_device_train_batch_size`) times
# `gradient_accumulation_steps` is the expected size of a Poisson batch: ten times that of above, and twice the passes, which
# is what private training asks for. `ledger` names a file into which every release is
# written before it is applied.
trainer = DPTrainer(
    adapted(),
    DPTrainingArguments(
        "private",
        per_device_train_batch_size=250,
        gradient_accumulation_steps=2,
        num_train_epochs=6,
        learning_rate=6e-3,
        logging_steps=20,
        target_epsilon=3.0,
        target_delta=1e-5,
        max_grad_norm=0.5,
        ledger="run.ledger",
        **quiet,
    ),
    train_dataset=train,
    eval_dataset=test,
    compute_metrics=right,
)
trainer.train()
reached = trainer.evaluate()["eval_accuracy"]
print(f"private training: test accuracy {reached:.3f}")

# %%
# The settings above were tried out on these test texts, so that both accuracies are a little optimistic; tune on public
# records in a training of your own ([how](../start/good-model.md)).
#
# ## Read the account
epsilon = 3.0
spent = trainer.privacy_engine.get_epsilon(delta=1e-5)
print(trainer.privacy_engine.summary(delta=1e-5))
print(f"epsilon spent {spent:.3f} of {epsilon}")

# %%
# ## What an attacker sees
#
# The simplest attack on membership: a record that the model has learnt has a smaller loss. If losses of records that took
# part and of others were alike, a random pair would be ordered rightly in half of the cases. The picture has the share of
# texts below each loss.
#
# ![Losses of records that took part and of others](text_lora-losses.png)
from matplotlib.figure import Figure


@torch.no_grad()
def losses_of(model, records):
    model.eval()
    columns = {name: torch.tensor([record[name] for record in records]) for name in records[0]}
    return torch.nn.functional.cross_entropy(
        model(input_ids=columns["input_ids"], attention_mask=columns["attention_mask"]).logits,
        columns["labels"],
        reduction="none",
    )


figure = Figure(figsize=(6.4, 2.6), layout="constrained")
for panel, (title, model) in zip(
    figure.subplots(1, 2, sharey=True), (("ordinary", ordinary.model), ("private, ε = 3", trainer.model)), strict=True
):
    members, others = losses_of(model, train[:1000]), losses_of(model, test)
    ordered = (members[:, None] < others).float().mean().item()
    print(f"{title}: a record that took part has the smaller loss in {ordered:.1%} of pairs")
    for values, label, colour in ((members, "took part", "#2a6f97"), (others, "did not", "#c77d2e")):
        panel.plot(values.sort().values, torch.linspace(0, 1, len(values)), color=colour, label=label)
    panel.set(title=title, xlabel="loss", xlim=(0, 4))
    panel.spines[["top", "right"]].set_visible(False)
panel.legend(frameon=False, loc="lower right")
figure.savefig("losses.png", dpi=110)

# %%
# Here it finds next to nothing even after ordinary training, for a few thousand trained numbers cannot hold five thousand
# texts. An attack that finds nothing proves nothing; [an audit](../privacy/audit.md) with canaries is the
# stronger test, and shown for [tabular data](tabular_loop.md).
#
# ## Release it
#
# `merge_and_unload` adds the adapters to the base: an ordinary model, with nothing of peft or ghostclip in it.
# `trainer.model.save_pretrained("adapter")` would save the adapters alone.
merged = trainer.model.merge_and_unload()
merged.config.id2label = dict(enumerate(PACKAGES))
merged.save_pretrained("released")
tokenizer.save_pretrained("released")
with open("released/README.md", "w", encoding="utf-8") as card:
    card.write(f"""# Which package a docstring is from

Differentially private: epsilon {spent:.2f} at delta 1e-5 for each text (one record replaced by nothing). DP-SGD with
ghostclip {ghostclip.__version__}, LoRA (r 4) and head, merged; Poisson batches of 500 of {len(train)} on average, 6
epochs, C 0.5, Adam. Test accuracy {reached:.2f}; the base model saw public texts only.
""")
loaded = AutoModelForSequenceClassification.from_pretrained("released")
print(loaded.config.id2label)
print(
    f"largest difference in the losses of 100 texts: {(losses_of(loaded, test[:100]) - losses_of(merged, test[:100])).abs().max():.1e}"
)

# %%
# **What stays with you:**
#
# - the ordinary model, and the folder `ordinary`;
# - losses in the trainer's log and the picture above: they are computed from private records without noise. Send no such
#   log to a service that others read;
# - checkpoints (`save_strategy`): their `optimizer.pt` holds the keys of noise and sampling;
# - the choice of the best checkpoint by private records: `load_best_model_at_end` is not in ε;
# - what further trainings on the same texts give, unless all are counted.
