"""`peft-mux demo`: a small backbone, a tokenizer and six tasks that it makes itself; imported as `peft_mux.demo`."""
