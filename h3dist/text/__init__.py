"""The prompt's way to hidden states: `tokenizer` (no torch) and `encoder` (transformers on use)."""
