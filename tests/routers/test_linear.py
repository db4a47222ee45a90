"""The linear router: a sum of one number per feature."""

from pathlib import Path

import pytest
import torch

from tests.routers.trained import drawn_artifact, see
from tokenrouter.routers import LinearRouter
from tokenrouter.routers.artifact import write_artifact


def test_the_score_is_a_sum(tmp_path: Path) -> None:
    """Guards against hidden units, or a number that is added twice: differences do not depend on the other features."""
    path = write_artifact(drawn_artifact("linear"), tmp_path / "router")
    router = LinearRouter(path=str(path))
    first_T = router.score(see(router, [28, 8, 8, 8, 8]))
    later_T = router.score(see(router, [8, 8, 8, 8, 28]))
    by_position = first_T[4] - later_T[0]
    torch.testing.assert_close(later_T[4] - first_T[0], by_position)
    assert abs(float(by_position)) > 0.1


def test_an_mlps_file_is_refused(tmp_path: Path) -> None:
    path = write_artifact(drawn_artifact("mlp"), tmp_path / "router")
    with pytest.raises(
        ValueError, match="kind 'mlp', and this is router=linear: choose router=mlp"
    ):
        LinearRouter(path=str(path))
