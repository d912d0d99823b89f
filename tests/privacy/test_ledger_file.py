"""The ledger's file: what is wrong with it is said, one engine writes to it, and nothing joins half a line."""

from __future__ import annotations

import copy
import gc
import os
import signal
import socket
import zlib
from contextlib import contextmanager

import pytest
import torch

from ghostclip import PrivacyEngine
from ghostclip.errors import CopyError, InvalidOptionError, ResumeError
from ghostclip.privacy import ledger_file
from ghostclip.privacy.ledger_file import Entry, LedgerFile, total
from tests.engine.training import parameters_of, small_data
from tests.private_run import PrivateRun

DATA = small_data(50)


def _entry(number, sigma=1.0):
    return Entry("run", number, ((sigma, 0.1, 1),), f"print {number}")


def _written(path, count=4):
    """A ledger with so many releases, given back: lines 1 and 2 begin it."""
    ledger = LedgerFile(path)
    for number in range(count):
        ledger.append(_entry(number))
    ledger.close()
    return path


def _lines(path):
    return path.read_bytes().splitlines(keepends=True)


def _in_child(work):
    """Run something in a forked process; return its exit status, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = work() or 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Run(PrivateRun):
    """A training with a ledger, step by step."""

    def __init__(self, ledger):
        super().__init__(DATA, ledger=ledger)

    def step(self):
        self.optimizer.zero_grad()
        self.backward(next(iter(self.loader)))
        self.optimizer.step()


# What is wrong with a file


def test_lines_survive_and_equal_steps_are_joined(tmp_path):
    (tmp_path / "sub").mkdir()
    first = LedgerFile(tmp_path / "sub" / "ledger")
    first.begin_segment({"noise_multiplier": 1.0, "clipping": {"rule": "flat"}})
    for number in range(3):
        first.append(_entry(number))
    first.close()
    second = LedgerFile(tmp_path / "sub" / "ledger")
    second.begin_segment({"noise_multiplier": 1.0, "clipping": {"rule": "flat"}})
    second.append(_entry(3, sigma=2.0))
    assert second.entries == [_entry(0), _entry(1), _entry(2), _entry(3, sigma=2.0)]
    assert total(second.entries) == [(1.0, 0.1, 3), (2.0, 0.1, 1)]
    assert second.find("run", 2) == "print 2"
    assert second.find("another run", 2) is None
    assert (tmp_path / "sub" / "ledger").read_text().count("mechanism") == 1


def _old(version):
    body = b'{"mechanism":{},"version":%d}' % version
    return body + b"\t%08x\n" % zlib.crc32(body)


DAMAGES = {
    "a line taken out": (lambda a, _: [*a[:3], *a[4:]], r"line 4: carries the number 4 where 3 is due.*missing"),
    "the first line taken out": (lambda a, _: a[1:], r"line 1: carries the number 1 where 0 is due.*missing"),
    "a line repeated": (lambda a, _: [*a[:4], *a[3:]], r"line 5: carries the number 3 where 4 is due.*repeated"),
    "two lines swapped": (lambda a, _: [*a[:3], a[4], a[3], a[5]], r"line 4: .*missing"),
    "a line of another ledger": (lambda a, b: [*a, b[5]], r"line 7: belongs to another ledger"),
    "the rest of another ledger": (lambda a, b: [*a[:3], *b[3:]], r"line 4: belongs to another ledger"),
    "a value changed": (lambda a, _: [*a[:3], a[3].replace(b"1.0", b"9.0"), *a[4:]], "line 4: the ledger is damaged"),
    "a hash changed": (lambda a, _: [*a[:3], a[3][:-2] + b"x\n", *a[4:]], "line 4: the ledger is damaged"),
    "no line": (lambda a, _: [*a[:3], b"\n", *a[3:]], "line 4: the ledger is damaged: this is no line"),
    "two lines joined": (lambda a, _: [*a[:3], a[3][:-1], *a[4:]], "line 4: the ledger is damaged"),
    "emptied": (lambda a, _: [], "the ledger is empty.*was emptied"),
    "less than a line": (lambda a, _: [a[0][:-9]], "line 1: the ledger is damaged"),
    "zeros": (lambda a, _: [bytes(4096)], "line 1: the ledger is damaged"),
    "the second format": (lambda a, _: [_old(2)], "format 2.*the version that began it"),
    "a later format": (lambda a, _: [_old(99)], "format 99.*a newer version"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_file_that_is_not_as_it_was_written_is_refused_and_left_alone(name, tmp_path):
    damage, said = DAMAGES[name]
    path, other = _written(tmp_path / "ledger"), _written(tmp_path / "other")
    path.write_bytes(b"".join(damage(_lines(path), _lines(other))))
    before = path.read_bytes()
    with pytest.raises(ResumeError, match=said):
        PrivacyEngine(ledger=path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("rest", [b"", b"x", b"\0"])
def test_a_last_line_that_lacks_nothing_but_its_end_counts(rest, tmp_path):
    path = _written(tmp_path / "ledger")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + rest)
    ledger = LedgerFile(path)
    assert len(ledger.entries) == 4
    ledger.append(_entry(4))
    assert path.read_bytes().startswith(whole)
    assert [entry.number for entry in LedgerFile(path).entries] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("rest", [b"{", b'{"events":[[1.0,', b"\0" * 300, b"\xff\xfe"])
def test_half_a_line_is_neither_read_nor_joined(rest, tmp_path):
    path = _written(tmp_path / "ledger")
    with path.open("ab") as file:
        file.write(rest)
    ledger = LedgerFile(path)
    assert len(ledger.entries) == 4
    ledger.append(_entry(4))
    assert [entry.number for entry in LedgerFile(path).entries] == [0, 1, 2, 3, 4]


# What a checkpoint has seen


def test_what_was_seen_must_be_there(tmp_path):
    path = _written(tmp_path / "ledger")
    lines, seen = _lines(path), LedgerFile(path).position()
    LedgerFile(path).require(seen)
    longer = LedgerFile(path)
    longer.append(_entry(4))
    longer.require(seen)
    assert longer.releases_at(seen) == longer.entries[:4]
    longer.close()
    for kept in range(1, len(lines)):
        path.write_bytes(b"".join(lines[:kept]))
        with pytest.raises(ResumeError, match=r"lines were cut off.*Restore the ledger"):
            LedgerFile(path).require(seen)
    with pytest.raises(ResumeError, match="Give the engine the ledger that belongs to it"):
        LedgerFile(_written(tmp_path / "other", 9)).require(seen)
    path.write_bytes(b"".join(lines[:-2]))
    rewritten = LedgerFile(path)
    rewritten.append(_entry(2, sigma=9.0))
    rewritten.append(_entry(3, sigma=9.0))
    with pytest.raises(ResumeError, match="line 6 is not here"):
        rewritten.require(seen)


# What is no file


def _irregular(folder):
    os.mkfifo(folder / "pipe")
    (folder / "file").write_bytes(b"")
    (folder / "link to a pipe").symlink_to(folder / "pipe")
    (folder / "link to a folder").symlink_to(folder)
    (folder / "link to a device").symlink_to("/dev/null")
    named = ("pipe", "link to a pipe", "link to a folder", "link to a device", "file/below", "socket", ".")
    return [*("/dev/null", "/dev/stdout", "/dev/zero", "/proc/self/status"), *(folder / name for name in named)]


def test_what_is_no_regular_file_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        for path in _irregular(tmp_path):
            with pytest.raises(InvalidOptionError, match="Name a file"):
                PrivacyEngine(ledger=path)


# One writer


def test_a_second_engine_is_refused_at_once_and_told_who_writes(tmp_path):
    run = Run(tmp_path / "ledger")
    with pytest.raises(ResumeError, match=rf"process {os.getpid()} on {socket.gethostname()} \(this one\) is writing"):
        Run(tmp_path / "ledger")
    assert _in_child(lambda: _refused(tmp_path / "ledger")) == 7
    assert PrivacyEngine(ledger=tmp_path / "ledger").get_epsilon(1e-5) == 0.0
    run.step()
    assert PrivacyEngine(ledger=tmp_path / "ledger").get_epsilon(1e-5) > 0.0
    run.engine.close()
    other = Run(tmp_path / "ledger")
    with pytest.raises(ResumeError, match="is writing to this ledger"):
        run.step()
    other.step()
    assert len(LedgerFile(tmp_path / "ledger").entries) == 2


def _refused(path):
    try:
        Run(path)
    except ResumeError as error:
        return 7 if f"process {os.getppid()} on" in str(error) else 8
    return 9


def test_an_engine_that_nobody_uses_holds_nothing(tmp_path):
    """As in a notebook, where a cell is run again: the old engine lives on in a cycle until it is collected."""
    gc.disable()
    try:
        run = Run(tmp_path / "ledger")
        run.step()
        del run
        Run(tmp_path / "ledger").step()
    finally:
        gc.enable()
    assert len(LedgerFile(tmp_path / "ledger").entries) == 2


def test_a_killed_process_holds_nothing_and_its_children_neither(tmp_path):
    reading, writing = os.pipe()

    def work():
        run = Run(tmp_path / "ledger")
        run.step()
        child = os.fork()
        if child == 0:
            # Outlives its parent, as a worker of a loader may for a while.
            os.close(writing)
            signal.pause()
        os.write(writing, str(child).encode())
        os.kill(os.getpid(), signal.SIGKILL)

    assert _in_child(work) == -signal.SIGKILL
    orphan = int(os.read(reading, 20))
    try:
        Run(tmp_path / "ledger").step()
    finally:
        os.kill(orphan, signal.SIGKILL)
        os.close(reading)
        os.close(writing)
    assert len(LedgerFile(tmp_path / "ledger").entries) == 2


def test_a_forked_child_cannot_write_and_its_parent_can(tmp_path):
    ledger = LedgerFile(tmp_path / "ledger")
    ledger.append(_entry(0))

    def work():
        with pytest.raises(ResumeError, match=f"forked from process {os.getppid()}"):
            ledger.append(_entry(1))

    assert _in_child(work) == 0
    ledger.append(_entry(1))
    assert LedgerFile(tmp_path / "ledger").entries == [_entry(0), _entry(1)]


def test_a_file_that_was_written_since_it_was_read_is_refused(tmp_path):
    old = LedgerFile(_written(tmp_path / "ledger"))
    none = LedgerFile(tmp_path / "new")
    other = LedgerFile(tmp_path / "ledger")
    other.append(_entry(4))
    other.close()
    _written(tmp_path / "new")
    for ledger in (old, none):
        with pytest.raises(ResumeError, match="when it was read"):
            ledger.append(_entry(4))


def test_two_that_begin_at_once_do_not_both(tmp_path, monkeypatch):
    first = LedgerFile(tmp_path / "ledger")
    encoded, raced = ledger_file.encoded, []

    def late(*arguments):
        if not raced:
            raced.append(True)
            _written(tmp_path / "ledger")
        return encoded(*arguments)

    monkeypatch.setattr(ledger_file, "encoded", late)
    with pytest.raises(ResumeError, match="another process has begun"):
        first.append(_entry(0))
    assert len(LedgerFile(tmp_path / "ledger").entries) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["ledger"]


# The file while it is open


def _copied_over(path):
    path.with_name("copy").write_bytes(path.read_bytes())
    path.with_name("copy").replace(path)


def _overwrite_end(path, content):
    with path.open("r+b") as file:
        file.seek(-len(content), os.SEEK_END)
        file.write(content)


def _append(path, content):
    with path.open("ab") as file:
        file.write(content)


ACCIDENTS = {
    "deleted": (lambda path: path.unlink(), "is gone"),
    "moved": (lambda path: path.rename(path.with_name("elsewhere")), "is gone"),
    "replaced": (lambda path: (path.rename(path.with_name("a")), _written(path)), "was replaced"),
    "replaced by itself": (_copied_over, "was replaced"),
    "emptied": (lambda path: os.truncate(path, 0), "was shortened from"),
    "shortened": (lambda path: os.truncate(path, path.stat().st_size - 1), "was shortened"),
    "its last line changed": (lambda path: _overwrite_end(path, b"00\n"), "was changed"),
    "written to": (lambda path: _append(path, b"a line\n"), "was written to by somebody else"),
    "written to in part": (lambda path: _append(path, b"{"), "was written to by somebody else"),
}


@pytest.mark.parametrize("name", ACCIDENTS)
def test_a_file_that_is_no_longer_the_one_that_was_left_stops_the_release(name, tmp_path):
    accident, said = ACCIDENTS[name]
    run = Run(tmp_path / "ledger")
    run.step()
    accident(tmp_path / "ledger")
    before, spent = parameters_of(run.model), run.engine.get_epsilon(1e-5)
    with pytest.raises(ResumeError, match=said):
        run.step()
    assert torch.equal(parameters_of(run.model), before)
    assert run.engine.get_epsilon(1e-5) == spent


# A full disk


@contextmanager
def _full_disk(monkeypatch, part, *, cutting_fails):
    """Let a write stop after a part of the line, and truncating fail, too."""

    def write(file, line, *, at):
        file.seek(at)
        file.write(line[: int(part * len(line))])
        raise OSError(28, "No space left on device")

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ledger_file, "_write_all", write)
        if cutting_fails:
            patch.setattr(os, "ftruncate", fail)
        yield


@pytest.mark.parametrize("cutting_fails", [False, True])
@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_what_a_full_disk_leaves_is_not_joined_by_the_next_line(part, cutting_fails, tmp_path, monkeypatch):
    run = Run(tmp_path / "ledger")
    run.step()
    before = parameters_of(run.model)
    for _ in range(2):
        with _full_disk(monkeypatch, part, cutting_fails=cutting_fails), pytest.raises(OSError, match="No space"):
            run.step()
    assert torch.equal(parameters_of(run.model), before)
    assert len(run.engine.accountant) == 1
    if part < 1 or not cutting_fails:
        assert len(LedgerFile(tmp_path / "ledger").entries) == 1
    run.step()
    assert len(LedgerFile(tmp_path / "ledger").entries) == 2
    assert len(run.engine.accountant) == 2


def test_a_disk_that_is_really_full_leaves_whole_lines(tmp_path):
    """By the limit of a file's size, at which a write puts down a part and the next fails."""
    resource = pytest.importorskip("resource")
    path = tmp_path / "ledger"

    def work():
        ledger = LedgerFile(path)
        ledger.append(_entry(0))
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, unlimited[1]))
        with pytest.raises(OSError, match="too large"):
            ledger.append(_entry(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        ledger.append(_entry(2))

    assert _in_child(work) == 0
    assert LedgerFile(path).entries == [_entry(0), _entry(2)]


def test_an_engine_that_writes_to_a_ledger_is_not_copied(tmp_path):
    run = PrivateRun(small_data(50), ledger=tmp_path / "ledger")
    with pytest.raises(CopyError, match="cannot be copied"):
        copy.deepcopy(run.engine)
    run.engine.close()
    copy.deepcopy(run.engine)
