"""PEFT methods of our own, for plain PEFT: configurations, layers and tuners, which know nothing of other tasks.

Each registers itself with PEFT when its file is imported here. `import peft_mux` sees to that as soon as PEFT itself is
imported, so that `PeftModel.from_pretrained` reads what was saved with them.
"""

from peft_mux.peft_methods.bottleneck import model as _bottleneck  # noqa: F401
from peft_mux.peft_methods.diff_pruning import model as _diff_pruning  # noqa: F401
