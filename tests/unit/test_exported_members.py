"""The public surface is a list; adding to it is a decision."""

import specdiff


def test_exports_are_exactly_these_and_resolve():
    assert set(specdiff.__all__) == {
        "BestFirst", "Budget", "Chain", "Generation", "Piece", "Samples", "SamplingOptions", "Settings", "Siblings",
        "SpecdiffError", "SpeculativeDecoder", "StopOptions", "__version__", "load",
    }  # fmt: skip
    for name in specdiff.__all__:
        assert getattr(specdiff, name) is not None
