"""Shapes as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdiff.errors import InputError
from specdiff.shapes import parse_shape, shape_text
from specdiff.types import EAGLE_TREE, BestFirst, CausalPaths, Chain, DynamicTree, Samples, Shape, Siblings, StaticTree

COUNT = st.integers(1, 99)
SHARE = st.floats(0.001, 1)
PATHS = st.tuples(COUNT, COUNT, SHARE, COUNT, SHARE).map(
    lambda v: CausalPaths(keep=min(v[0], v[1]), beam=max(v[0], v[1]), mass=v[2], cap=v[3], weight=v[4])
)
SHAPES = st.one_of(
    st.just(Chain()),
    COUNT.map(Samples),
    COUNT.map(BestFirst),
    st.lists(COUNT, min_size=1, max_size=5).map(lambda widths: Siblings(tuple(widths))),
    PATHS,
    st.booleans().map(lambda sampled: StaticTree(EAGLE_TREE.paths, sampled)),
    st.booleans().map(lambda sampled: StaticTree(((0,), (1,), (0, 0)), sampled)),
    st.tuples(COUNT, COUNT).map(lambda v: DynamicTree(max(v), min(v))),
    st.sampled_from([CausalPaths(), CausalPaths(beam=1), CausalPaths(keep=2), CausalPaths(weight=0)]),
)


@given(SHAPES)
def test_what_is_written_is_read_back(shape: Shape) -> None:
    assert parse_shape(shape_text(shape)) == shape


def test_texts_are_short() -> None:
    assert shape_text(CausalPaths()) == "paths:1"
    assert shape_text(CausalPaths(keep=5, beam=5)) == "paths:5"
    assert shape_text(CausalPaths(keep=2, mass=0.9)) == "paths:2,mass=0.9"
    assert shape_text(Siblings((3, 1))) == "siblings:3,1"
    assert shape_text(BestFirst(8, size=len)) == "best-first:8"


@pytest.mark.parametrize("text", ["paths:0", "paths:beam=0", "paths:mass=0", "paths:mass=1.5", "paths:4,beam=2"])
def test_values_out_of_range_are_named(text: str) -> None:
    with pytest.raises(InputError, match=r"^(keep|beam|mass): expected"):
        parse_shape(text)


@pytest.mark.parametrize("text", ["paths:1,width=3", "paths:x", "paths:1,mass", "chains", "best-first:", "siblings:a"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"^shape: expected"):
        parse_shape(text)
