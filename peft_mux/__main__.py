"""`python -m peft_mux`, and `accelerate launch -m peft_mux`."""

from __future__ import annotations

import sys

from peft_mux.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
