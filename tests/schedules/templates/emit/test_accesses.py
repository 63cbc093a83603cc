from __future__ import annotations

import pytest
from tvm import te, tirx
from tvm.tirx.analysis import undefined_vars

from relaxtune.schedules.templates.emit.accesses import Access, Accesses
from relaxtune.schedules.tir.dataflow import Dataflow, recognise_dataflow
from tests.schedules.templates import memory_cases as cases
from tests.schedules.templates.memory_cases import MemoryCase, tensor


def accesses_of(case: MemoryCase, lanes: int) -> dict[str, Access]:
    """Return the accesses by buffer, a later one of a buffer with a stroke after its name."""
    flow = recognise_dataflow(case.func())
    assert isinstance(flow, Dataflow)
    found: dict[str, Access] = {}
    for access in Accesses(flow, lanes).found:
        name = str(access.buffer.name)
        found[name + "'" * sum(known.rstrip("'") == name for known in found)] = access
    return found


def shape(access: Access) -> tuple[int, int]:
    """Return the elements of an instruction, and for how many lanes there is one index."""
    return access.width, len(access.indices)


def test_row_and_bias_are_read_in_vectors_of_16_bytes() -> None:
    found = accesses_of(cases.layer_norm((5, 768)), 8)
    assert {name: shape(access) for name, access in found.items()} == {"x": (8, 1), "gamma": (8, 1), "beta": (8, 1)}
    # A bias is the same for all rows.
    assert {name for name, access in found.items() if len(undefined_vars(access.indices[0])) > 1} == {"x"}
    assert not any(access.per_row for access in found.values())


@pytest.mark.parametrize(("lanes", "width"), [(8, 4), (4, 4), (2, 2), (1, 0)])
def test_float32_takes_two_accesses_for_eight_lanes(lanes: int, width: int) -> None:
    assert accesses_of(cases.row_extremes((3, 64)), lanes)["x"].width == width


def test_gather_reads_the_index_once_and_the_row_in_vectors() -> None:
    found = accesses_of(cases.embedding(6, 64, 9), 8)
    assert shape(found["ids"]) == (0, 1)
    assert found["ids"].per_row
    assert shape(found["table"]) == (8, 1)
    assert list(found["table"].inner.values()) == [(found["ids"], 0)]
    assert list(found) == ["ids", "table", "position"]


def test_halves_of_a_rotation_are_read_in_vectors_where_a_branch_needs_them() -> None:
    found = accesses_of(cases.rotary(2, 3, 4, 64), 8)
    assert shape(found["packed"]) == shape(found["packed'"]) == shape(found["packed''"]) == (8, 1)
    assert found["packed"].conditions == ()
    assert [len(found[name].conditions) for name in ("packed'", "packed''")] == [1, 1]


def test_branch_that_divides_a_vector_is_taken_lane_by_lane() -> None:
    found = accesses_of(cases.rotary(1, 3, 2, 12), 4)
    assert [len(access.conditions) for access in found.values()].count(4) == 2
    assert found["packed"].width == 4


def test_load_that_was_made_before_a_branch_is_not_made_again() -> None:
    def tensors() -> list[te.Tensor]:
        ids, table = tensor("ids", (6,), "int64"), tensor("table", (9, 64))

        def row(i: tirx.Var) -> tirx.Expr:
            return tirx.if_then_else(ids[i] < 0, ids[i] + 9, ids[i])

        return [ids, table, te.compute((6, 64), lambda i, j: table[row(i), j], name="rows")]

    found = accesses_of(MemoryCase(tensors, lambda x: x), 8)
    assert list(found) == ["ids", "table"]
    assert found["ids"].conditions == ()


def test_each_side_of_a_branch_in_an_index_is_read_under_its_condition() -> None:
    def tensors() -> list[te.Tensor]:
        ids, near, far = tensor("ids", (6,), "int64"), tensor("near", (4,), "int64"), tensor("far", (9,), "int64")
        table = tensor("table", (9, 64))

        def row(i: tirx.Var) -> tirx.Expr:
            return tirx.if_then_else(ids[i] < 4, near[ids[i]], far[ids[i]])

        return [ids, near, far, table, te.compute((6, 64), lambda i, j: table[row(i), j], name="rows")]

    found = accesses_of(MemoryCase(tensors, lambda x: x), 8)
    assert list(found) == ["ids", "near", "far", "table"]
    assert [len(found[name].conditions) for name in found] == [0, 1, 1, 0]
    assert {access for access, _ in found["table"].inner.values()} == {found[name] for name in ("ids", "near", "far")}


def test_rows_at_odd_addresses_are_read_in_what_divides_them() -> None:
    def tensors() -> list[te.Tensor]:
        x = tensor("x", (6, 70))
        return [x, te.compute((6, 64), lambda i, j: x[i, j + 2], name="part")]

    # Rows start at multiples of 140 bytes, and 4 bytes further.
    assert shape(accesses_of(MemoryCase(tensors, lambda x: x), 8)["x"]) == (2, 1)


def test_transpose_is_scattered() -> None:
    found = accesses_of(cases.transpose((16, 24), (1, 0)), 8)
    assert found["x"].scattered
    assert len(found["x"].indices) == 8


def test_scalar_is_read_once() -> None:
    def tensors() -> list[te.Tensor]:
        x, scale = tensor("x", (6, 64)), tensor("scale", ())
        return [x, scale, te.compute((6, 64), lambda i, j: x[i, j] * scale(), name="scaled")]

    scale = accesses_of(MemoryCase(tensors, lambda x: x), 8)["scale"]
    assert shape(scale) == (0, 1)
    assert isinstance(scale.indices[0], tirx.IntImm)
