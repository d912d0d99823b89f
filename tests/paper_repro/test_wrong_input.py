"""Wrong options and data that is not there: one line, and the exit status that shells expect."""

from __future__ import annotations

import gzip

import pytest
import torch

from paper_repro import __main__ as program
from paper_repro.data import DataError, with_data
from paper_repro.tables import load


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["G"], "invalid choice: 'G'"),
        (["A", "--stpes", "3"], "unrecognized arguments: --stpes"),
        (["A", "--steps", "0"], "argument --steps: 0 is not at least 1"),
        (["A", "--minutes", "-1"], "argument --minutes: -1.0 is negative"),
        (["A", "--case", "resnet"], "argument --case: unknown: resnet (there are: mnist-cnn, "),
        (["E", "--engine", "jax"], "argument --engine: unknown: jax (there are: nonprivate, "),
        (["A", "--tiny", "--full"], "not allowed with argument --tiny"),
        (["A", "--device", "abacus"], "argument --device: abacus: "),
        (["B", "--data", "."], "argument --data: linear has no data set"),
        (["E", "--data", "nowhere"], "argument --data: nowhere is not a folder"),
    ],
)
def test_a_wrong_option_is_one_line(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        program.main(arguments)
    assert stopped.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("python -m paper_repro: error: ")
    assert said in last


def _case(letter, group):
    return next(case for case in load(letter, "small").cases if case.group == group)


def test_mnist_is_read(tmp_path):
    head = (0x803, 3, 28, 28)
    pixels = bytes(range(256)) * 9 + bytes(48)
    content = b"".join(number.to_bytes(4, "big") for number in head) + pixels
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(content))
    labels = b"".join(number.to_bytes(4, "big") for number in (0x801, 3)) + bytes([7, 0, 9])
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(labels)
    images, targets = with_data(_case("A", "mnist-cnn"), tmp_path).task.batch(torch.device("cpu"))
    assert images.shape == (16, 1, 28, 28)
    assert targets.tolist() == [7, 0, 9] * 5 + [7]
    assert images[0, 0, 0, 1].item() == pytest.approx((1 / 255 - 0.1307) / 0.3081)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(labels[:-1])
    with pytest.raises(DataError, match="not a file of MNIST's format"):
        with_data(_case("A", "mnist-cnn"), tmp_path)


def test_cifar_is_read(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    record = bytes([4]) + bytes([255]) * 1024 + bytes([0]) * 2048
    (folder / "data_batch_1.bin").write_bytes(record * 2)
    task = with_data(_case("E", "cnn"), tmp_path).task
    images, targets = task.batch(torch.device("cpu"))
    assert images.shape == (task.batch_size, 3, 32, 32)
    assert set(targets.tolist()) == {4}
    assert images[0, :, 0, 0].tolist() == pytest.approx([(1 - 0.4914) / 0.2470, -0.4822 / 0.2435, -0.4465 / 0.2616])


def test_texts_are_read(tmp_path):
    (tmp_path / "train.tsv").write_text("sentence\tlabel\na film a\t1\nno film\t0\n", encoding="utf-8")
    (tmp_path / "trainset.csv").write_text('mr,ref\n"name[A], food[B]",A serves B\n', encoding="utf-8")
    line = '{{"gold_label": "{}", "sentence1": "One.", "sentence2": "Two."}}\n'
    (tmp_path / "snli_1.0_train.jsonl").write_text(line.format("-") + line.format("neutral"), encoding="utf-8")
    for name in ("neg", "pos"):
        (tmp_path / "aclImdb" / "train" / name).mkdir(parents=True)
        (tmp_path / "aclImdb" / "train" / name / "0_1.txt").write_text(name, encoding="utf-8")
    task = with_data(_case("D", "roberta-large"), tmp_path).task
    ids_BT, labels = task.batch(torch.device("cpu"))
    assert ids_BT.shape == (task.batch_size, 256)
    assert labels.tolist() == [1, 0] * (task.batch_size // 2)
    assert ids_BT[0, 0] == ids_BT[0, 2] != ids_BT[0, 1] == ids_BT[1, 1]
    assert ids_BT[0, 3:].eq(0).all()
    ids_BT, next_BT = with_data(_case("D", "gpt2"), tmp_path).task.batch(torch.device("cpu"))
    assert torch.equal(ids_BT[:, 1:], next_BT[:, :-1])
    assert set(with_data(_case("C", "bert"), tmp_path).task.batch(torch.device("cpu"))[1].tolist()) == {1}
    assert with_data(_case("A", "imdb-lstm"), tmp_path).task.batch(torch.device("cpu"))[1].tolist() == [0, 1] * 8


@pytest.mark.parametrize(("letter", "group"), [("A", "mnist-cnn"), ("A", "imdb-lstm"), ("C", "bert"), ("D", "gpt2")])
def test_data_that_is_missing_is_named(letter, group, tmp_path):
    with pytest.raises(DataError, match=r"exist|has no \*\.txt"):
        with_data(_case(letter, group), tmp_path)


def test_malformed_text_is_named(tmp_path):
    (tmp_path / "train.tsv").write_text("sentence\tlabel\na film\tgood\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"sst2 in .*ValueError"):
        with_data(_case("D", "roberta-large"), tmp_path)
