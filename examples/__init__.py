"""Programs that show what the library does."""
