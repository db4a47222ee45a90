"""The fixed layer map."""

import pytest

from tokenrouter.routers import LayerwiseRouter
from tokenrouter.types import LayerSpan


@pytest.mark.parametrize(
    ("high_layers", "num_layers", "expected"),
    [
        ((0, 1, -2, -1), 30, [(0, 2, "high"), (2, 28, "low"), (28, 30, "high")]),
        ((2,), 4, [(0, 2, "low"), (2, 3, "high"), (3, 4, "low")]),
        ((0, -4, 3), 4, [(0, 1, "high"), (1, 3, "low"), (3, 4, "high")]),
        ((), 3, [(0, 3, "low")]),
        ((0, 1, 2), 3, [(0, 3, "high")]),
    ],
)
def test_spans(
    high_layers: tuple[int, ...], num_layers: int, expected: list[tuple[int, int, str]]
) -> None:
    """Guards against layers shifted by one, negative numbers taken as they are, empty spans."""
    (route,) = LayerwiseRouter(high_layers).routes(num_layers).routes
    assert list(route.spans) == [LayerSpan(*span) for span in expected]


@pytest.mark.parametrize("layer", [30, -31])
def test_layers_that_do_not_exist_are_refused(layer: int) -> None:
    """Guards against a map written for a deeper model, which would lose its last layers."""
    with pytest.raises(ValueError, match=rf"high_layers \[{layer}\] do not exist: -30 to 29"):
        LayerwiseRouter([0, layer]).routes(30)
