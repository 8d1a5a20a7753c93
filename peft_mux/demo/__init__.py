"""The demo. In a checkout its modules are in `examples/demo`; a wheel has them in this folder (`setup.cfg`)."""

from pathlib import Path

__path__ = [str(Path(__file__).parents[2] / "examples" / "demo")]
