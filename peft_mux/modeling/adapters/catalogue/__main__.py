"""Prints the page `docs/peft_types.md`, or writes it to the path that is given."""

from __future__ import annotations

import sys
from pathlib import Path

from peft_mux.modeling.adapters.catalogue.document import page

if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(page(), encoding="utf-8")
    else:
        sys.stdout.write(page())
