"""Idle OpenMP threads end, and come back where they are needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os, time, torch
from ebbtide.models.threads import release_idle_threads

def threads(): return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
before = threads()
data = torch.ones(1 << 22)
assert float(data.sum()) == 1 << 22
grown = threads()
release_idle_threads()
deadline = time.monotonic() + 10
while threads() > before and time.monotonic() < deadline:
    time.sleep(0.01)
print(grown > before, threads() == before, float(data.sum()) == 1 << 22)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_idle_threads_end_and_come_back():
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.split() == ["True", "True", "True"]
