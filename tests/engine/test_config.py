"""The engine's settings are checked when they are built."""

from __future__ import annotations

import pytest

from ebbtide.engine.config import EngineConfig
from ebbtide.errors import InputError


@pytest.mark.parametrize("deadline", [0.0, -1.0, float("inf"), float("nan"), 1e10])
def test_a_load_deadline_is_a_time_that_can_be_waited_for(deadline: float) -> None:
    with pytest.raises(InputError, match="load_deadline_s must be above 0"):
        EngineConfig(load_deadline_s=deadline)
