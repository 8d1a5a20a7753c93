"""The forms of rows that losses of preferences read."""

from __future__ import annotations

from dataclasses import replace

from peft_mux.data.formats import DataFormat, RowForm
from peft_mux.data.preferences.mismatched import with_mismatched
from peft_mux.data.preferences.odds_rows import OddsRows
from peft_mux.data.preferences.pair_rows import PairRows
from peft_mux.data.preferences.scored_rows import ScoredRows
from peft_mux.data.preferences.single_rows import SingleRows
from peft_mux.data.preferences.unpaired import unpaired

_PAIRED = (DataFormat.TOKENIZED_PREFERENCE, DataFormat.PREFERENCE)

PAIR_ROWS = RowForm(_PAIRED, is_one_term=True, reader=PairRows, marks=("prompt", "chosen", "rejected"))
"""A chosen and a rejected answer, with loss on both."""
ODDS_ROWS = RowForm(_PAIRED, is_one_term=True, reader=OddsRows)
"""A chosen and a rejected answer, with loss on both and on the prompt of the chosen one."""
SINGLE_ROWS = RowForm(
    (DataFormat.TOKENIZED_UNPAIRED, DataFormat.UNPAIRED_PREFERENCE),
    is_one_term=True,
    reader=SingleRows,
    marks=("prompt", "completion", "label"),
    view=unpaired,
)
"""An answer and whether it is good."""
KTO_ROWS = replace(SINGLE_ROWS, arrange=with_mismatched)
"""The same, and each prompt with the answer to another."""
SCORED_ROWS = RowForm(_PAIRED, is_one_term=True, reader=ScoredRows, marks=("chosen", "rejected"), num_labels=1)
"""A better and a worse text, for classifiers."""
