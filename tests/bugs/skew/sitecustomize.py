"""A machine whose clock is wrong by CLOCK_SKEW seconds: Python runs this before anything else."""

from __future__ import annotations

import os
import time

SKEW = float(os.environ.get("CLOCK_SKEW", "0"))
right, right_ns = time.time, time.time_ns
time.time = lambda: right() + SKEW
time.time_ns = lambda: right_ns() + int(SKEW * 1e9)
