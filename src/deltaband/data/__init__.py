"""Data as users bring them: inputs, batches of rows, labels, and the record of the rows that were read."""
