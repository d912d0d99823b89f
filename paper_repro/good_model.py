"""From a poor first private training to a good one at the same ε, measured: `python -m paper_repro.good_model`.

Four packages' docstrings are told apart: 4,600 private texts to train on, 600 to choose settings by, 800 to report on.
The public half, other texts of the same kind, trains the body whose features are used, and is tuned on.

Shape suffixes: N records, T positions, F features.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import harness
from benchmarks.harness import machine_line
from ghostclip import PrivacyEngine, get_noise_multiplier
from ghostclip.mechanisms import AveragedWeights
from paper_repro.accuracy.training import READ, quiet
from paper_repro.measure import say
from paper_repro.tutorials.stand_ins import PACKAGES, bert, halves, save_base_classifier

RESULTS: Final = Path(__file__).resolve().parent / "results"
EPSILON, DELTA = 8.0, 2e-5
TRAIN, CHOOSE, REPORT = 4600, 600, 800
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
BATCHES = (230, 920, 2300)
CLIPS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
EPOCHS = (2, 5, 10, 20, 40, 80)
CLIPPINGS = ("flat", "automatic", "adaptive")
COLOURS = ("#8d99ae", "#c77d2e", "#2a6f97", "#1b4332")


@dataclass(frozen=True)
class Setting:
    """One training.

    Attributes:
        what: "scratch" trains a BERT from random weights, "base" all of one that has read public texts, "raw" a head on
            its features as they are, "head" one on its features scaled by public statistics.
        lr: Of AdamW.
        batch: Records of a Poisson batch, on average.
        epochs: Passes.
        clip: C.
        clipping: As `make_private` takes it.
        private: False for ordinary training.
        public: Whether the records are public ones, a quarter as many with a quarter of the batch and of the noise.
    """

    what: str
    lr: float
    batch: int = 920
    epochs: int = 20
    clip: float = 1.0
    clipping: str = "flat"
    private: bool = True
    public: bool = False


@lru_cache(maxsize=1)
def data() -> tuple[int, dict[str, Tensor], dict[str, list[tuple[Tensor, Tensor]]]]:
    """Return the tokenizer's size, the base model's weights, and parts (train, choose, report, public) by input."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        save_base_classifier(folder)
        body = AutoModelForSequenceClassification.from_pretrained(folder).bert.eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
    public, private = halves()
    order = torch.randperm(len(private), generator=torch.Generator().manual_seed(0)).tolist()
    groups = [order[:TRAIN], order[TRAIN : TRAIN + CHOOSE], order[TRAIN + CHOOSE : TRAIN + CHOOSE + REPORT]]
    texts = [[private[number] for number in group] for group in groups]
    chosen = torch.randperm(len(public), generator=torch.Generator().manual_seed(0))[: TRAIN // 4].tolist()
    texts.append([(public[number][0], public[number][1].partition("/")[0]) for number in chosen])
    ids, raw = [], []
    for part in texts:
        batch = tokenizer([text for text, _ in part], padding="max_length", truncation=True, return_tensors="pt")
        labels_N = torch.tensor([PACKAGES.index(package) for _, package in part])
        with torch.no_grad():
            states_NTF = body(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        mask_NT1 = batch["attention_mask"][..., None]
        ids.append((batch["input_ids"], labels_N))
        raw.append(((states_NTF * mask_NT1).sum(1) / mask_NT1.sum(1), labels_N))
    mean_F, spread_F = raw[3][0].mean(0), raw[3][0].std(0)
    scaled = [((inputs_NF - mean_F) / spread_F, labels_N) for inputs_NF, labels_N in raw]
    weights = {name: value.detach().clone() for name, value in body.state_dict().items()}
    return len(tokenizer), weights, {"scratch": ids, "base": ids, "raw": raw, "head": scaled}


class _Bert(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        words, weights, _ = data()
        self.model = bert(words, len(PACKAGES))
        if what == "base":
            self.model.bert.load_state_dict(weights)

    def forward(self, ids_NT: Tensor) -> Tensor:
        return self.model(input_ids=ids_NT, attention_mask=(ids_NT != 0).long()).logits


def trained(setting: Setting, seed: int, part: int) -> dict[str, float]:
    """Train, and return the accuracy of the last weights and of two averages.

    Args:
        setting: What to train.
        seed: Of the initial weights; batches and noise are drawn anew in each run.
        part: 1 to be evaluated on the records to choose by, 2 on those to report on.
    """
    parts = data()[2][setting.what]
    torch.manual_seed(seed)
    model = _Bert(setting.what) if setting.what in ("scratch", "base") else nn.Linear(parts[0][0].shape[1], 4)
    quarter = 4 if setting.public else 1
    inputs, labels = parts[3 if setting.public else 0]
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=setting.lr)
    loader: Any = DataLoader(
        TensorDataset(inputs, labels), batch_size=setting.batch // quarter, shuffle=not setting.private
    )
    module, epsilon = model, float("inf")
    if setting.private:
        engine = PrivacyEngine()
        module, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=noise(setting) / quarter,
            max_grad_norm=setting.clip, clipping=setting.clipping, probe=False,
        )  # fmt: skip
    steps = setting.epochs * max(1, round(len(labels) / (setting.batch // quarter)))
    averages = {
        "exponential": AveragedWeights(model, optimizer, decay=0.95),
        "tail": AveragedWeights(model, optimizer, kind="tail", start=steps // 2),
    }
    module.train()
    for _ in range(setting.epochs):
        for some, wanted in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(some), wanted).backward()
            optimizer.step()
    if setting.private and not setting.public:
        epsilon = engine.get_epsilon(DELTA)
    model.eval()
    found = {"last": _accuracy(model, *parts[part])}
    for name, average in averages.items():
        with average.applied():
            found[name] = _accuracy(model, *parts[part])
    return {**found, "epsilon": epsilon}


@cache
def _noise(batch: int, epochs: int) -> float:
    return get_noise_multiplier(
        target_epsilon=EPSILON, target_delta=DELTA, sample_rate=batch / TRAIN, epochs=epochs
    )  # fmt: skip


def noise(setting: Setting) -> float:
    """Return the noise multiplier for ε."""
    return _noise(setting.batch, setting.epochs)


@torch.no_grad()
def _accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    return (model(inputs).argmax(1) == labels).float().mean().item()


def measured(setting: Setting, seeds: Sequence[int], part: int) -> dict[str, Any]:
    """Return a setting with the mean and the standard error of each kind of weights over seeds."""
    runs = [trained(setting, seed, part) for seed in seeds]
    spread = {
        name: statistics.stdev(run[name] for run in runs) / len(runs) ** 0.5 if len(runs) > 1 else 0.0 for name in READ
    }
    return {
        **asdict(setting),
        "sigma": noise(setting) if setting.private else 0.0,
        "epsilon": runs[0]["epsilon"] if setting.private and not setting.public else None,
        "seeds": len(runs),
        "scores": {name: [run[name] for run in runs] for name in READ},
        **{name: [statistics.fmean(run[name] for run in runs), spread[name]] for name in READ},
    }


def _setting(cell: Mapping[str, Any]) -> Setting:
    return Setting(**{name: cell[name] for name in Setting.__dataclass_fields__})


def _best(cells: Sequence[dict[str, Any]], weights: str = "last") -> Setting:
    return _setting(max(cells, key=lambda cell: cell[weights][0]))


def curves(tuning: Sequence[int], short: Callable[[Sequence[Any]], Sequence[Any]]) -> dict[str, list[dict[str, Any]]]:
    """Train the curves of the page, on the records to choose by.

    Args:
        tuning: Seeds.
        short: Which of the values are taken.
    """

    def curve(name: str, settings: Sequence[Setting], seeds: Sequence[int] = tuning) -> list[dict[str, Any]]:
        say(f"== {name}: {len(settings)} settings, {len(seeds)} seeds")
        return [measured(setting, seeds, 1) for setting in settings]

    found = {"rate and batch": curve("rate and batch", [
        Setting("head", lr, batch=batch) for batch in short(BATCHES) for lr in short(RATES)])}  # fmt: skip
    best = _best([cell for cell in found["rate and batch"] if cell["batch"] in (920, short(BATCHES)[-1])])
    found["clip"] = curve("clip", [replace(best, clip=clip) for clip in short(CLIPS)])
    best = replace(best, clip=_best(found["clip"]).clip)
    found["epochs"] = curve("epochs", [replace(best, epochs=epochs) for epochs in short(EPOCHS)])
    # A quarter of the records, of the batch and of σ: σ/B and the number of steps are those of the private training.
    found["public"] = curve("public", [replace(best, clip=1.0, lr=lr, public=True) for lr in short(RATES)])
    found["clipping"] = curve("clipping", [
        replace(best, clipping=clipping, lr=lr, clip=1.0 if clipping == "automatic" else best.clip)
        for clipping in CLIPPINGS for lr in short((best.lr / 3, best.lr, best.lr * 3))])  # fmt: skip
    found["scratch"] = curve("scratch", [Setting("scratch", lr, epochs=4) for lr in short(RATES[1:4])], tuning[:1])
    found["base"] = curve("base", [Setting("base", lr, epochs=4) for lr in short(RATES[1:3])], tuning[:1])
    return found


def ladder(found: Mapping[str, list[dict[str, Any]]], seeds: Sequence[int], few: Sequence[int]) -> list[dict[str, Any]]:
    """Train each step of the page with the settings that the curves chose, on the records to report on.

    Args:
        found: The curves.
        seeds: Of trainings of a head.
        few: Of trainings of a whole BERT.
    """
    first = Setting("scratch", 1e-3, batch=64, epochs=4)
    rate = _best([cell for cell in found["rate and batch"] if cell["batch"] in (920, found["clip"][0]["batch"])])
    clip = replace(rate, clip=_best(found["clip"]).clip)
    steps = [
        ("ordinary-bert", "ordinary training, BERT from scratch", replace(first, private=False), "last"),
        ("ordinary-head", "ordinary training, a head on features", Setting("head", 1e-2, 64, private=False), "last"),
        ("first", "first try: BERT from scratch, everything as in ordinary training", first, "last"),
        ("batch", "batch of 920 for 64", replace(first, batch=920), "last"),
        ("rate", "learning rate tuned", _best(found["scratch"]), "last"),
        ("base", "BERT that has read public texts, all of it trained", _best(found["base"]), "last"),
        ("features", "only a head on its features", Setting("raw", rate.lr), "last"),
        ("scaled", "features scaled by public statistics", Setting("head", rate.lr), "last"),
        ("tuned", "batch, passes and C tuned", replace(clip, epochs=_best(found["epochs"]).epochs), "last"),
        ("average", "average of the weights", replace(clip, epochs=_best(found["epochs"]).epochs), "tail"),
        ("automatic", "automatic clipping in place of a tuned C", _best(
            [cell for cell in found["clipping"] if cell["clipping"] == "automatic"], "tail"), "tail"),
        ("adaptive", "adaptive clipping (a quantile of the norms)", _best(
            [cell for cell in found["clipping"] if cell["clipping"] == "adaptive"], "tail"), "tail"),
    ]  # fmt: skip
    rows = []
    for name, title, setting, weights in steps:
        say(f"== {title}")
        row = measured(setting, few if setting.what in ("scratch", "base") else seeds, 2)
        rows.append({"name": name, "title": title, "weights": weights, **row})
    return rows


def parameters(what: str) -> int:
    """Return how many numbers are trained."""
    return sum(p.numel() for p in (_Bert(what) if what in ("scratch", "base") else nn.Linear(64, 4)).parameters())


def steps_table(report: Mapping[str, Any]) -> str:
    """Return the steps as a table, which the page of the docs shows too."""
    lines = [
        "| | trained numbers P | batch B | passes | learning rate | C | σ | σ·√P/B | accuracy, % |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in report["ladder"]:
        numbers = report["parameters"][row["what"]]
        noisy = f"{row['sigma']:.2f} | {row['sigma'] * numbers**0.5 / row['batch']:.3f}" if row["private"] else "– | –"
        clip = f"{row['clip']:g}" if row["private"] else "–"
        lines.append(
            f"| {row['title']} | {numbers:,} | {row['batch']} | {row['epochs']} | {row['lr']:.2g} | {clip} | {noisy} | "
            f"{shown(row[row['weights']])} |"
        )
    return "\n".join(lines)


def markdown(report: Mapping[str, Any]) -> str:
    """Write the report for people."""
    lines = [
        "# From a first ε to a good model\n",
        f"`{report['command']}` on {machine_line(report)}\n",
        f"{TRAIN:,} private texts of four packages to train on, {CHOOSE} to choose settings by, {REPORT} to report on; "
        f"ε = {EPSILON:g}, δ = {DELTA:g}, AdamW. Accuracy in percent ± standard error of the mean over seeds (initial "
        "weights, batches and noise); settings were chosen on other records and seeds than those reported.\n",
        steps_table(report),
        f"\n{report['ladder'][-1]['seeds']} runs of a head, {report['ladder'][0]['seeds']} of a BERT.",
    ]
    for name, across in (("rate and batch", "lr"), ("clip", "clip"), ("epochs", "epochs"), ("public", "lr"),
                         ("clipping", "lr"), ("scratch", "lr"), ("base", "lr")):  # fmt: skip
        lines += [
            f"\n## Curve: {name}\n",
            f"| batch | clipping | {across} | last | exponential average | tail average |",
        ]
        lines.append("|---:|---|---:|---:|---:|---:|")
        for cell in report["curves"][name]:
            scores = " | ".join(shown(cell[weights]) for weights in READ)
            lines.append(f"| {cell['batch']} | {cell['clipping']} | {cell[across]:.3g} | {scores} |")
    return "\n".join(lines) + "\n"


def shown(pair: Sequence[float]) -> str:
    """Return a mean and its standard error in percent."""
    return f"{100 * pair[0]:.1f}" + (f" ± {100 * pair[1]:.1f}" if pair[1] else "")


def filled(template: str) -> str:
    """Return the page of the docs with the committed numbers in it.

    Args:
        template: The page; `@name@` stands for the accuracy of a step, `@name-exponential@` for that of its average.
    """
    report = json.loads((RESULTS / "good-model.json").read_text(encoding="utf-8"))
    values = {"STEPS": steps_table(report)}
    for row in report["ladder"]:
        values[row["name"]] = shown(row[row["weights"]])
        values[f"{row['name']}-exponential"] = shown(row["exponential"])
    public, curves = report["curves"]["public"], report["curves"]["rate and batch"]
    alike = [cell for cell in curves if cell["batch"] == public[0]["batch"]]
    values |= {"public-rate": f"{_best(public).lr:g}", "private-rate": f"{_best(alike).lr:g}"}
    return re.sub(r"@([A-Za-z-]+)@", lambda match: values[match.group(1)], template)


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Draw the steps, and the curves with their standard errors.

    Args:
        report: As read from its file.
        path: The PNG file to write.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 8.4), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(1, 1.35))
    bars = upper.subplots()
    rows = report["ladder"]
    bars.barh(
        range(len(rows)), [100 * row[row["weights"]][0] for row in rows],
        xerr=[100 * row[row["weights"]][1] for row in rows],
        color=[COLOURS[2] if row["private"] else COLOURS[0] for row in rows], height=0.7, ecolor="#333333",
    )  # fmt: skip
    bars.set_yticks(range(len(rows)), [row["title"] for row in rows], fontsize=8)
    bars.invert_yaxis()
    bars.set_xlabel("accuracy, % (grey: ordinary training)", fontsize=8)
    panels = lower.subplots(2, 3).flat
    curves = report["curves"]

    def line(panel: Any, cells: Sequence[Any], across: str, label: str, colour: str, weights: str = "last") -> None:
        values = [[100 * number for number in cell[weights]] for cell in cells]
        panel.errorbar(
            [cell[across] for cell in cells], [mean for mean, _ in values], [error for _, error in values],
            label=label, color=colour, marker="o", ms=3, capsize=2, lw=1,
        )  # fmt: skip

    for batch, colour in zip(dict.fromkeys(cell["batch"] for cell in curves["rate and batch"]), COLOURS, strict=False):
        cells = [cell for cell in curves["rate and batch"] if cell["batch"] == batch]
        line(panels[0], cells, "lr", f"batch {batch}", colour)
    line(panels[1], curves["clip"], "clip", "", COLOURS[2])
    for (weights, said), colour in zip(
        {"last": "last weights", "tail": "tail average"}.items(), COLOURS[1:], strict=False
    ):
        line(panels[2], curves["epochs"], "epochs", said, colour, weights)
    batch = curves["public"][0]["batch"]
    alike = [cell for cell in curves["rate and batch"] if cell["batch"] == batch]
    line(panels[3], alike, "lr", "private, all records", COLOURS[2])
    line(panels[3], curves["public"], "lr", "public, a quarter, equal σ/B", COLOURS[1])
    for clipping, colour in zip(CLIPPINGS, COLOURS[1:], strict=True):
        line(panels[4], [cell for cell in curves["clipping"] if cell["clipping"] == clipping], "lr", clipping, colour)
    line(panels[5], curves["scratch"], "lr", "from scratch", COLOURS[1])
    line(panels[5], curves["base"], "lr", "read public texts", COLOURS[2])
    titles = (
        "learning rate and batch",
        "C",
        "passes",
        "tuning on public records",
        "clipping",
        "all of a BERT, batch 920",
    )
    names = ("learning rate", "C", "passes", "learning rate", "learning rate", "learning rate")
    for panel, title, name in zip(panels, titles, names, strict=True):
        panel.set_title(title, fontsize=9)
        panel.set_xscale("log")
        panel.minorticks_off()
        if name == "passes":
            panel.set_xticks(
                [cell["epochs"] for cell in curves["epochs"]], [cell["epochs"] for cell in curves["epochs"]]
            )
        panel.set_xlabel(name, fontsize=8)
        panel.tick_params(labelsize=7)
        if panel.get_legend_handles_labels()[1]:
            panel.legend(fontsize=7, frameon=False)
    for panel in (bars, *panels):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="x" if panel is bars else "y", alpha=0.3)
    figure.savefig(path, dpi=100)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure everything.

    Args:
        arguments: The command line; the process's own by default.

    Returns:
        The exit status: 1 if a training cost more than its ε.
    """
    parser = argparse.ArgumentParser(prog="python -m paper_repro.good_model", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="reported runs of a head; of a BERT 2 (default: 5)")
    parser.add_argument("--quick", action="store_true", help="does it run, in two minutes; not what is better")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the files (default: %(default)s)")
    options = parser.parse_args(arguments)
    quiet()
    seeds = range(1, 2 if options.quick else options.seeds + 1)
    tuning = range(1000, 1001 if options.quick else 1002)
    found = curves(tuning, (lambda values: values[1:2]) if options.quick else (lambda values: values))
    rows = ladder(found, seeds, seeds[:2])
    report = {
        "command": "python -m paper_repro.good_model" + " --quick" * options.quick,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": harness.describe(torch.device("cpu")),
        "epsilon": EPSILON,
        "delta": DELTA,
        "parameters": {what: parameters(what) for what in ("scratch", "base", "raw", "head")},
        "ladder": rows,
        "curves": found,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / "good-model"
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    stem.with_suffix(".md").write_text(markdown(report), encoding="utf-8")
    plot(report, stem.with_suffix(".png"))
    return int(any((row["epsilon"] or 0) > EPSILON for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
