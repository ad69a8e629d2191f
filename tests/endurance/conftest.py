"""Long runs of the real server: `make test-endurance` only. What judges them is tested with everything else."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What has the marker runs when it is asked for."""
    if "endurance" in str(config.option.markexpr):
        return
    chosen = [item for item in items if item.get_closest_marker("endurance") is None]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen
