"""Host side of generation: requests in, batches of fixed shape run, results out."""
