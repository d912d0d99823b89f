"""The one walk over containers, against torch's pytree."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from ghostclip import _torch, _tree

A, B, C = torch.zeros(1), torch.zeros(2), torch.zeros(3)
Pair = namedtuple("Pair", "first second")
TREES = {
    "nested": {"a": A, "rest": [B, "text", (C, None, 3)]},
    "named tuple": (Pair(A, [B]), C),
    "ordered dict": OrderedDict(z=A, y=(B, C)),
    "slices": (A, slice(1, 2), ..., torch.float32, B, {"c": C}),
    "parameters": (torch.nn.Parameter(A), B, C),
    "packed": (pack_sequence([B, A]), C),
    "empty": ((), [], {}),
}
if find_spec("transformers") is not None:
    from transformers.modeling_outputs import CausalLMOutput

    TREES["registered output"] = [CausalLMOutput(loss=A, logits=B), C]


@pytest.mark.parametrize("name", TREES)
def test_leaves_are_those_of_pytree(name):
    found, expected = _tree.leaves(TREES[name]), _torch.tree_leaves(TREES[name])
    assert len(found) == len(expected)
    assert all(one is two for one, two in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", TREES)
def test_mapped_trees_are_those_of_pytree(name):
    def doubled(leaf):
        return leaf * 2 + 1 if isinstance(leaf, torch.Tensor) else leaf

    found, expected = _tree.mapped(doubled, TREES[name]), _torch.tree_map(doubled, TREES[name])
    assert type(found) is type(expected)
    one, two = _torch.tree_flatten(found), _torch.tree_flatten(expected)
    assert one[1] == two[1]
    assert all(a is b or torch.equal(a, b) for a, b in zip(one[0], two[0], strict=True))


def test_sizes_are_leaves():
    """Pytree takes them apart into numbers, which no operation would take for a size again."""
    assert _tree.leaves((A, torch.Size([3, 4]))) == [A, torch.Size([3, 4])]
    assert type(_tree.mapped(lambda leaf: leaf, [torch.Size([3])])[0]) is torch.Size


@dataclass
class Record:
    ids: torch.Tensor
    more: dict


class Plain:
    def __init__(self):
        self.parts, self.name = [B, Record(C, {})], "plain"


def test_tensors_of_objects_are_found_when_asked_for():
    """What collate functions and models make: mappings, data classes, objects with attributes; each tensor once."""
    batch = UserDict({"a": A, "again": [A], "record": Record(B, {"c": C})})
    assert _tree.tensors(batch) == []
    assert [len(tensor) for tensor in _tree.tensors(batch, into_objects=3)] == [1, 2, 3]
    assert [len(tensor) for tensor in _tree.tensors((Plain(), A), into_objects=2)] == [1, 2, 3]
    assert [len(tensor) for tensor in _tree.tensors((A, A))] == [1, 1]


def test_functions_and_types_are_no_containers():
    assert _tree.tensors([Plain, lambda: A, torch.nn.Linear(1, 1), A], into_objects=2) == [A]


def test_what_refers_to_itself_ends():
    circle = Plain()
    circle.parts = [circle, A]
    assert _tree.tensors(circle, into_objects=5) == [A]


class Attributes(dict):
    """Items that are attributes, too, as outputs of models have them."""

    def __setitem__(self, name, value):
        super().__setitem__(name, value)
        vars(self)[name] = value


@dataclass(frozen=True)
class Frozen:
    first: object
    name: str = "frozen"


def _attributes(value):
    made = Attributes()
    made["first"] = value
    return made


OBJECTS = {
    "data class": (Frozen, lambda item: item.first),
    "mapping": (lambda value: UserDict(first=value), lambda item: item["first"]),
    "items and attributes": (_attributes, lambda item: item.first),
    "inside": (lambda value: [(Frozen(UserDict(first=value)), B)], lambda tree: tree[0][0].first["first"]),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_are_opened_and_closed_around_other_leaves(name):
    make, first = OBJECTS[name]
    tree = make(A)
    opened = _tree.opened(tree, into_objects=2)
    assert _tree.tensors(opened)[0] is A
    other = _tree.closed(_tree.mapped(lambda leaf: C if leaf is A else leaf, opened))
    assert first(other) is C
    assert first(tree) is A
    assert type(other) is type(tree)


def test_what_holds_no_tensors_stays_closed():
    tree = [Frozen("text"), torch.nn.Linear(1, 1), Plain]
    assert _tree.opened(tree, into_objects=2) == tree
