class DeltabandWarning(UserWarning):
    """Something that makes the intervals less trustworthy than they look."""
