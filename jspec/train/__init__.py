"""Training of draft heads: text, hidden states, heads, evaluation. Needs the extra `train`."""
