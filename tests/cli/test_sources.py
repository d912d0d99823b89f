"""Reading text from real files: what is read, and what is refused with file and line."""

from __future__ import annotations

import json

import pytest

from ghostclip.errors import DataError
from ghostclip.finetune.samples import read_documents


def test_python_documentation_is_the_default():
    documents = read_documents(None)
    assert len(documents) > 50
    assert sum(map(len, documents)) > 300_000


def test_text_file_is_one_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffÄ first line\nand a second\n".encode())
    assert read_documents(path) == ["Ä first line\nand a second\n"]


def test_folder_is_read_in_order_and_to_any_depth(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "b.md").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "deep" / "er" / "c.rst").write_text("third")
    (tmp_path / "deep" / "rows.jsonl").write_text('{"text": "fourth"}\n')
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / ".hidden.txt").write_text("not read")
    assert read_documents(tmp_path) == ["first", "second", "third", "fourth"]


def test_jsonl_rows_are_documents(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"body": "one\u2028line"}, {"body": "two", "id": 3}, {"body": None}, {"body": "  "}]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n", encoding="utf-8")
    assert read_documents(path, text_column="body") == ["one\u2028line", "two"]


@pytest.mark.parametrize("content", ['id,text\n1,"a, b\nc"\n2,d\n', '"id";text\n1,5;"a, b\nc"\n2;d\n'])
def test_csv_rows_are_documents(tmp_path, content):
    path = tmp_path / "rows.csv"
    path.write_text(content, newline="")
    assert read_documents(path) == ["a, b\nc", "d"]


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("rows.jsonl", b'{"text": "a"}\n{"body": "b"}\n', r"line 2: no column 'text' \(found: body\)"),
        ("rows.jsonl", b'{"text": "a"}\nnot json\n', "line 2: not JSON"),
        ("rows.jsonl", b'["a"]\n', "line 1: holds a list"),
        ("rows.jsonl", b'{"text": 3}\n', "line 1: 'text' holds a int"),
        ("rows.csv", b"id,body\n1,b\n", r"no column 'text' \(found: id, body\)"),
        ("rows.csv", b"", "holds no text"),
        ("rows.csv", b"text\n", "holds no text"),
        ("a.txt", b"", "holds no text"),
        ("a.txt", b" \n\t ", "holds no text"),
        ("a.txt", b"fine \xff\xfe not fine", r"not UTF-8 text \(byte 5\)"),
        ("a.json", b"[]", r"name the file \.jsonl"),
    ],
)
def test_wrong_file_is_named_with_its_line(tmp_path, name, content, match):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=match) as caught:
        read_documents(path)
    assert str(path) in str(caught.value)
