"""What users bring: inputs, batches of rows, labels, and what is remembered of the rows."""
