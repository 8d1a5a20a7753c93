"""Files that commands read: rows, and a tiny backbone with its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peft_mux.demo.small_llama import make_backbone, make_tokenizer


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def save_backbone(folder: Path, texts: Sequence[str]) -> None:
    """Save a tiny backbone, and a tokenizer of the words of some texts."""
    tokenizer = make_tokenizer(texts)
    for part in (make_backbone(tokenizer, hidden_size=32, num_layers=2), tokenizer):
        part.save_pretrained(folder)
