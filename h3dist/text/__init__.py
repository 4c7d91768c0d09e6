"""The prompt's way to hidden states: `presentation` (pieces), `tokenizer` (no torch), `vision` and `encoder`."""
