"""From rows to `MuxBatch`: formats, tokenising, order, collation.

Rows pass through the files in this order: `sources.py`; `formats.py`; `tokenize.py` with `rows.py` and
`preferences.py`; `dataset.py`, or `streams.py` for rows that come one by one; `collator.py` with `packing/`;
`batch.py`.
"""
