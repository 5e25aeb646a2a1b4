"""Gradients of a network layer by layer, from hooks on one forward pass."""
