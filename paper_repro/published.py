"""The published figures, each with its source, and which of our engines does what a published column did.

They were measured on other hardware, with other versions: a reference, nothing to subtract from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Reference:
    """A published table.

    Attributes:
        title: What it shows, in which units.
        source: Where it is from.
        columns: Titles of the columns after the first.
        rows: Title of each row with its cells.
    """

    title: str
    source: str
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[str, ...]]

    def beside(self, row: str, engines: Mapping[str, str]) -> dict[str, str]:
        """The cells of one row, by engine.

        Args:
            row: Title of the row.
            engines: Names of engines with the column that did what they do.

        Returns:
            Engine names with "column: cell".
        """
        cells = dict(zip(self.columns, self.rows[row], strict=True))
        return {engine: f"{column}: {cells[column]}" for engine, column in engines.items()}

    def markdown(self) -> str:
        """The whole table, with its source.

        Returns:
            Markdown.
        """
        lines = [f"| | {' | '.join(self.columns)} |", f"|---|{'---:|' * len(self.columns)}"]
        lines += [f"| {title} | {' | '.join(cells)} |" for title, cells in self.rows.items()]
        return f"{self.title} ({self.source}).\n\n" + "\n".join(lines) + "\n"


OPACUS_PAPER = (
    "Yousefpour et al., “Opacus: User-friendly differential privacy library in PyTorch”, arXiv 2109.12298, Figure 1"
)
OPACUS_REPORT = "Opacus's own CPU report, commit baea28a, batch 16"
BLOG = "“Enabling fast gradient clipping and ghost clipping in Opacus”, PyTorch blog, 2024-08-20, one P100 16 GB"
BOOK_KEEPING = (
    "Bu et al., “Differentially private optimization on large model at small cost”, ICML 2023, arXiv 2210.00038, "
    "one A100 40 GB"
)
MIXED = (
    "Bu, Mao and Xu, “Scalable and efficient training of large convolutional neural networks with differential "
    "privacy”, arXiv 2205.10683, Table 4"
)

LAYERS = Reference(
    "Seconds per forward and backward",
    OPACUS_REPORT,
    ("plain", "GradSampleModule", "ratio"),
    {
        "conv": ("2.0218", "3.2889", "1.627"),
        "embedding": ("0.002484", "0.013665", "5.500"),
        "groupnorm": ("0.00018715", "0.00043171", "2.307"),
        "instancenorm": ("0.0044931", "0.0060584", "1.348"),
        "layernorm": ("0.00011228", "0.00022411", "1.996"),
        "linear": ("0.0010106", "0.0030530", "3.021"),
        "mha": ("0.018872", "0.026884", "1.425"),
        "rnn": ("0.015766", "0.101784", "6.456"),
        "gru": ("0.045030", "0.240204", "5.334"),
        "lstm": ("0.052635", "0.298218", "5.666"),
    },
)

_BLOG_COLUMNS = ("PyTorch SGD", "DP-SGD (hooks)", "Fast gradient clipping", "Ghost clipping")
BERT = Reference(
    "BERT, last three blocks trainable: peak memory / seconds per step, by batch size",
    BLOG,
    _BLOG_COLUMNS,
    {
        "32": ("236 MB / 0.15", "1,142 MB / 0.21", "908 MB / 0.21", "362 MB / 0.21"),
        "128": ("1.04 GB / 0.55", "4.55 GB / 0.68", "3.6 GB / 0.75", "1.32 GB / 0.67"),
        "512": ("5.27 GB / 2.1", "OOM", "OOM", "5.27 GB / 2.5"),
        "1024": ("12.7 GB / 4.2", "OOM", "OOM", "12.7 GB / 5"),
        "2048": ("OOM", "OOM", "OOM", "OOM"),
    },
)
BERT_ENGINES = {
    "nonprivate": "PyTorch SGD",
    "opacus-hooks": "DP-SGD (hooks)",
    "opacus-fast": "Fast gradient clipping",
    "opacus-ghost": "Ghost clipping",
}

STAGES = Reference(
    "MLP 5120-2560-1280: maximum memory increase in MB, by stage",
    BLOG,
    ("to device", "forward", "1st backward", "2nd backward", "step"),
    {
        "B=32, SGD": ("62.5", "0.5", "62.5", "–", "0"),
        "B=32, DP-SGD (hooks)": ("62.5", "0.47", "3663", "–", "162.5"),
        "B=32, ghost clipping": ("62.5", "0.47", "63.13", "50", "125"),
        "B=131072, SGD": ("62.5", "1920", "1932.5", "–", "0"),
        "B=131072, DP-SGD (hooks)": ("OOM", "OOM", "OOM", "OOM", "OOM"),
        "B=131072, ghost clipping": ("62.5", "1920", "2625", "1932.5", "125"),
    },
)

_LANGUAGE_COLUMNS = ("non-private", "BK", "GhostClip", "Opacus")
LANGUAGE = Reference(
    "Largest batch; examples per second at the batch size in brackets (0: out of memory)",
    BOOK_KEEPING,
    _LANGUAGE_COLUMNS,
    {
        "gpt2": ("157; 341 (100)", "149; 274 (100)", "156; 209 (100)", "43; 0 (100)"),
        "gpt2-medium": ("70; 148 (50)", "69; 119 (50)", "70; 91 (50)", "15; 0 (50)"),
        "gpt2-large": ("29; 71 (20)", "29; 62 (20)", "29; 44 (20)", "5; 0 (20)"),
        "roberta-large": ("51; 97 (16)", "41; 68 (16)", "48; 54 (16)", "16; 49 (16)"),
    },
)
LANGUAGE_ENGINES = {"nonprivate": "non-private", "bookkeeping": "BK", "ghost": "GhostClip", "opacus-hooks": "Opacus"}

VISION = Reference(
    "Largest number of images per second, over batch sizes",
    BOOK_KEEPING,
    ("non-private", "BK-MixOpt", "MixGhostClip", "Opacus", "GhostClip"),
    {
        "vgg11, 224²": ("833", "417", "435", "299", "15"),
        "vgg11, 384²": ("208", "174", "149", "148", "0"),
        "beit-large, 224²": ("169", "127", "95", "3", "93"),
        "beit-large, 384²": ("43", "30", "23", "1", "23"),
    },
)
VISION_ENGINES = {
    "nonprivate": "non-private",
    "bookkeeping": "BK-MixOpt",
    "ghost": "MixGhostClip",
    "opacus-hooks": "Opacus",
    "opacus-ghost": "GhostClip",
}

CIFAR = Reference(
    "CIFAR-10, physical batch 256, 16 GB: seconds per epoch, active GB",
    MIXED,
    ("Opacus", "FastGradClip", "Ghost", "Mixed", "Non-DP"),
    {
        "cnn": ("12, 1.37", "11, 0.94", "11, 2.47", "7, 0.79", "5, 0.66"),
        "resnet18": ("OOM", "45, 6.32", "59, 4.00", "37, 3.31", "14, 3.30"),
        "resnet50": ("OOM", "OOM", "158, 9.62", "119, 9.62", "49, 9.56"),
        "vgg11": ("OOM", "18, 5.17", "14, 2.58", "13, 2.58", "5, 2.54"),
        "vgg16": ("OOM", "33, 5.61", "29, 3.41", "23, 2.84", "8, 2.81"),
    },
)
CIFAR_ENGINES = {
    "nonprivate": "Non-DP",
    "ghost": "Mixed",
    "opacus-hooks": "Opacus",
    "opacus-fast": "FastGradClip",
    "opacus-ghost": "Ghost",
}

CORRELATED = Reference(
    title="CIFAR-10 without amplification, CNN, 10 epochs, batch 512, ε = 9, δ = 1e-5: test accuracy, %, single runs",
    source="outputs of a notebook of JAX-Privacy; BISR is of Kalinin et al., arXiv 2505.12128",
    columns=("DP-SGD", "BSR(4)", "BISR(4)"),
    rows={"test accuracy": ("34.1", "39.6", "48.6")},
)
