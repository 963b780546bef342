"""What all tests share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the same numbers on a machine with an accelerator
os.environ["DLSCALE_CACHE"] = "off"  # tests see what a first run sees

# A first example may compile for a second: hypothesis must not call that flaky.
settings.register_profile("dlscale", deadline=None)
settings.load_profile("dlscale")
