"""The ground floor: what every subject stands on, and which knows none of them."""

import os
import tempfile
from pathlib import Path

try:
    Path.home()
except RuntimeError:  # a container whose user has no entry: what is downloaded goes where temporary files do
    os.environ["DLSCALE_DATA"] = os.environ.get("DLSCALE_DATA") or str(Path(tempfile.gettempdir(), "dlscale"))
