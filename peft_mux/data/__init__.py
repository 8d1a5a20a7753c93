"""From rows to `MuxBatch`: formats, tokenising, order, packing, chunks, collation."""
