"""From rows to `MuxBatch`: formats, tokenising, order, collation.

Rows pass through the files in this order: `formats.py`; `tokenize.py` with `cells.py`, `chat_rows.py`,
`labelled_rows.py` and `length_limit.py`; `dataset.py`; `loader.py`, or `streams/` where rows come one by one;
`collator.py` with `peft_mux.packing` and `parts.py`; `batch.py`; `chains.py`.
"""
