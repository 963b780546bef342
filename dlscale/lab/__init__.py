"""The ground floor: what every subject stands on, and which knows none of them."""

import os
import tempfile
from pathlib import Path

given = os.environ.get("DLSCALE_DATA")
try:
    Path(given or "~").expanduser()
except RuntimeError:  # a container whose user has no entry: what is downloaded goes where temporary files do
    if given:
        raise ValueError(f"DLSCALE_DATA={given} names a home folder that is not here: write the whole path.") from None
    os.environ["DLSCALE_DATA"] = str(Path(tempfile.gettempdir(), "dlscale"))
