"""Tables of embeddings in the copy of a model."""

import torch
from torch import nn


def make_plain(table: nn.Embedding | nn.EmbeddingBag, model: nn.Module) -> None:
    """Make the gradients dense and not scaled by frequency; shorten all rows, of a copy, instead of those looked up."""
    table.sparse = table.scale_grad_by_freq = False
    if table.max_norm is None:
        return
    w = table.weight
    if sum(each is w for module in model.modules() for each in module._parameters.values()) != 1:
        raise TypeError(
            "an Embedding with max_norm changes its weight whenever it is called, and others use it: shorten it once"
        )
    shortened = w.detach().clone()
    torch.embedding_renorm_(shortened, torch.arange(len(w), device=w.device), table.max_norm, table.norm_type)
    table.weight, table.max_norm = nn.Parameter(shortened, w.requires_grad), None
