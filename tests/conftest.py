"""What all tests share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the same numbers on a machine with an accelerator
os.environ["DLSCALE_CACHE"] = "off"  # tests see what a first run sees

# A first example may compile for a second: hypothesis must not call that flaky. In CI the examples are the same each
# time, so that a change is judged by itself; elsewhere new ones are tried.
settings.register_profile("dlscale", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("dlscale")
