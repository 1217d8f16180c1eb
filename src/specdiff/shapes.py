"""Draft shapes as text: what the command line, plan files and tables write, and how it is read back."""

from __future__ import annotations

from specdiff.errors import InputError
from specdiff.types import EAGLE_TREE, BestFirst, CausalPaths, Chain, DynamicTree, Samples, Shape, Siblings, StaticTree


def parse_shape(text: str) -> Shape:
    """Read a draft shape.

    Raises:
        InputError: the text is none of the forms, or a value is out of range.
    """
    kind, _, value = text.partition(":")
    try:
        if kind == "chain" and not value:
            return Chain()
        if kind == "samples":
            return Samples(int(value))
        if kind == "siblings":
            return Siblings(tuple(int(w) for w in value.split(",")))
        if kind == "best-first":
            return BestFirst(int(value))
        if kind == "paths":
            return _paths(value)
        if kind == "static":
            return _static(value)
        if kind == "dynamic":
            return _dynamic(value)
    except InputError:
        raise
    except ValueError:
        pass
    raise InputError.of(
        "shape",
        expected="chain, samples:K, siblings:W1,W2,..., best-first:NODES, paths:KEEP, static:eagle, static:PATHS or "
        "dynamic:NODES",
        got=text,
        remedy="for example --shape best-first:24",
    )


def shape_text(shape: Shape) -> str:
    """A shape as `parse_shape` reads it; what sizes a best-first tree (`BestFirst.size`) is no part of it."""
    match shape:
        case Chain():
            return "chain"
        case Samples(k):
            return f"samples:{k}"
        case Siblings(widths):
            return "siblings:" + ",".join(map(str, widths))
        case BestFirst(nodes):
            return f"best-first:{nodes}"
        case CausalPaths():
            rest = {name: getattr(shape, name) for name in ("beam", "mass", "cap", "weight")}
            usual = CausalPaths(keep=shape.keep, beam=max(CausalPaths.beam, shape.keep))
            values = [f"{name}={value!r}" for name, value in rest.items() if value != getattr(usual, name)]
            return ",".join([f"paths:{shape.keep}", *values])
        case StaticTree(paths, sampled):
            nodes = ["eagle"] if paths == EAGLE_TREE.paths else [".".join(map(str, path)) for path in paths]
            return "static:" + ",".join([*nodes, *(["sampled"] if sampled else [])])
        case DynamicTree(nodes, top):
            return f"dynamic:{nodes},top={top}"


def _paths(text: str) -> CausalPaths:
    """Read ``KEEP,beam=B,mass=M,cap=C,weight=W``, each part optional; the beam is as wide as KEEP at least."""
    first, *rest = text.split(",")
    if "=" in first:
        first, rest = "", [first, *rest]
    given = dict(part.split("=") for part in rest)
    keep = int(first) if first else 1
    beam = int(given.pop("beam", max(CausalPaths.beam, keep)))
    cap = int(given.pop("cap", CausalPaths.cap))
    mass, weight = float(given.pop("mass", CausalPaths.mass)), float(given.pop("weight", CausalPaths.weight))
    if given:
        raise ValueError(given)
    return CausalPaths(beam=beam, keep=keep, mass=mass, cap=cap, weight=weight)


def _static(text: str) -> StaticTree:
    """Read ``eagle`` or nodes such as ``0,1,0.0,0.1``, and ``,sampled`` behind either."""
    parts = text.split(",")
    sampled = parts[-1] == "sampled"
    nodes = parts[:-1] if sampled else parts
    if nodes == ["eagle"]:
        return StaticTree(EAGLE_TREE.paths, sampled)
    return StaticTree(tuple(tuple(int(rank) for rank in node.split(".")) for node in nodes), sampled)


def _dynamic(text: str) -> DynamicTree:
    """Read ``NODES,top=K``, each part optional."""
    nodes, _, rest = text.partition(",")
    name, _, top = rest.partition("=")
    if rest and name != "top":
        raise ValueError(rest)
    return DynamicTree(int(nodes) if nodes else DynamicTree.nodes, int(top) if rest else DynamicTree.top)
