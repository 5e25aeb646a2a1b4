"""Rows to gradients: the user's model as a differentiable function of its parameters."""
