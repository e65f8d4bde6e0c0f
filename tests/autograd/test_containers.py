"""Tensors in nested containers: replaced on the way in, and changes brought back on the way out."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from naranhi.autograd.containers import map_tensors, tensors_of, to_bf16, write_back


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclass
class Record:
    value: torch.Tensor


def inside():
    return torch.ones(2)


CONTAINERS = {
    "list": lambda: [inside()],
    "tuple": lambda: (inside(),),
    "named tuple": lambda: Pair(inside(), inside()),
    "dict": lambda: {"a": inside()},
    "dataclass": lambda: Record(inside()),
    "tuple in a tuple": lambda: ((inside(),),),
    "list in a tuple": lambda: ([inside()],),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_what_a_module_changes_reaches_the_caller_and_what_replaced_its_tensors_does_not(kind):
    given = [CONTAINERS[kind]()]
    own = list(tensors_of(given))
    copies = []
    seen = map_tensors(to_bf16, given, copies)
    assert {tensor.dtype for tensor in tensors_of(seen)} == {torch.bfloat16}
    seen.append("more")
    write_back(copies)
    assert given[1] == "more"
    assert all(one is other for one, other in zip(tensors_of(given), own, strict=True))


def test_where_nothing_changes_the_container_is_the_same():
    given = [(torch.ones(2),)]
    assert map_tensors(lambda tensor: tensor, given) is given
