"""The lab's package lies under tools/."""

import pathlib
import sys

TOOLS = str(pathlib.Path(__file__).resolve().parents[3] / "tools")
if TOOLS not in sys.path:
    sys.path.insert(0, TOOLS)
