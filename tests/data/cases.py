"""Rows as the tests of data read them."""

from __future__ import annotations

from typing import Any

from peft_mux.data.dataset import TokenizedDataset, tokenize_dataset
from peft_mux.data.formats import LANGUAGE_ROWS, RowForm
from peft_mux.data.tokenize import TokenizeOptions


def read(rows: Any, form: RowForm = LANGUAGE_ROWS, tokenizer: Any = None, **options: Any) -> TokenizedDataset:
    """Return rows as tokens of task a; options are those of `TokenizeOptions`, and the `split`."""
    where = {"split": options.pop("split")} if "split" in options else {}
    settings = TokenizeOptions(**{"task": "a", "max_length": 32, "row_form": form, **options})
    return tokenize_dataset(rows, options=settings, tokenizer=tokenizer, **where)
