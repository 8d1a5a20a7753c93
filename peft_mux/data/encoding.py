"""Whether a file of rows is UTF-8, told by line: readers of JSON and CSV name neither the file nor the place."""

from __future__ import annotations

import codecs
from pathlib import Path

from peft_mux.errors import Fault

_CHUNK_BYTES = 2**20


def encoding_fault(path: Path, where: str) -> list[Fault]:
    """Return a fault that names the first line of a file which is not UTF-8; nothing where all are.

    Args:
        path: path of a text file.
        where: dotted path of the field that names it, such as `tasks.sql.dataset`.

    Raises:
        OSError: if the file cannot be read.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    line = 1
    with path.open("rb") as file:
        while True:
            chunk = file.read(_CHUNK_BYTES)
            kept = decoder.getstate()[0]  # of a character that the chunk before ended in
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                line += (kept + chunk)[: error.start].count(b"\n")
                return [_fault(path, where, line, (kept + chunk)[error.start])]
            if not chunk:
                return []
            line += chunk.count(b"\n")


def _fault(path: Path, where: str, line: int, byte: int) -> Fault:
    return Fault(
        where,
        f"{path.name} line {line}, byte 0x{byte:02x}",
        "UTF-8",
        f"If it is Latin-1: iconv -f latin1 -t utf-8 {path.name} > utf8-{path.name}",
    )
