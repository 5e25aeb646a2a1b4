"""Hugging Face models as they are: tiny ones with random weights, so nothing is downloaded."""

import copy

import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import DataLoader

import tests.reference as reference
from deltaband import Exact, PredictionIntervals

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # their own
DAMPING = 0.5
N = 48
WORDS = {"vocab_size": 12, "num_labels": 1, "pad_token_id": 0}


def bert(**options):
    config = transformers.BertConfig(
        hidden_size=6, num_hidden_layers=1, num_attention_heads=2, intermediate_size=6, max_position_embeddings=9,
        **WORDS, **options,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def distilbert():
    config = transformers.DistilBertConfig(
        dim=6, n_layers=1, n_heads=2, hidden_dim=6, max_position_embeddings=9, **WORDS
    )
    return transformers.DistilBertForSequenceClassification(config)


def gpt2():
    config = transformers.GPT2Config(
        n_positions=9, n_embd=4, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1, **WORDS
    )
    return transformers.GPT2ForSequenceClassification(config)


def llama():
    config = transformers.LlamaConfig(
        hidden_size=4, intermediate_size=5, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        bos_token_id=1, eos_token_id=1, **WORDS,
    )  # fmt: skip
    return transformers.LlamaForSequenceClassification(config)


def vit():
    config = transformers.ViTConfig(
        hidden_size=4, num_hidden_layers=1, num_attention_heads=2, intermediate_size=5, image_size=4, patch_size=2,
        num_channels=1, num_labels=1,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def sentences(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 8, (n,), generator=generator).tolist()
    return [{"input_ids": torch.randint(1, 12, (length,), generator=generator)} for length in lengths]


def images(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [{"pixel_values": torch.randn(1, 4, 4, generator=generator)} for _ in range(n)]


def collated(rows):
    """A batch as a tokenizer gives it: padded to the longest."""
    if "pixel_values" in rows[0]:
        return transformers.BatchFeature({"pixel_values": torch.stack([row["pixel_values"] for row in rows])})
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    lengths = torch.tensor([[len(row["input_ids"])] for row in rows])
    return transformers.BatchEncoding(
        {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths).long()}
    )


def with_labels(rows):
    return {**collated(rows), "labels": torch.tensor([row["labels"] for row in rows])}


def apart(batch):
    return {name: value for name, value in batch.items() if name != "labels"}, batch["labels"]


def prediction(out):
    return out.logits[..., 0]


MODELS = {
    "BERT": (bert, sentences),
    "BERT, eager attention": (lambda: bert(attn_implementation="eager"), sentences),
    "DistilBERT": (distilbert, sentences),
    "GPT-2": (gpt2, sentences),
    "Llama": (llama, sentences),
    "ViT": (vit, images),
}


@pytest.mark.filterwarnings("ignore:the network has p", "ignore:n − p")
@pytest.mark.parametrize("form", ["dual", "primal"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_intervals_of_plain_gradients(name, form):
    torch.manual_seed(0)
    make, rows = MODELS[name]
    model = make()
    p = sum(w.numel() for w in model.parameters())
    n = N if form == "dual" else p + 10
    train, new = rows(n), rows(5, seed=1)
    y = torch.randn(n)
    labelled = [{**row, "labels": value} for row, value in zip(train, y.tolist(), strict=True)]
    loader = DataLoader(labelled, batch_size=8, collate_fn=with_labels)
    state = copy.deepcopy(model.state_dict())
    band = PredictionIntervals(model, damping=DAMPING, engine=Exact(), output=prediction, batch=apart)
    band.fit(loader, progress=False)
    q, h = band.variance(collated(new)), band.leverage(collated(new))
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert model.training
    model.eval()
    J, g = (
        reference.jacobians(
            model, [{key: value[None] for key, value in row.items()} for row in each], output=prediction
        )
        for each in (train, new)
    )
    q_, h_, p_star = reference.answers(J, DAMPING, g)
    np.testing.assert_allclose(q, q_[:, 0], rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(h, h_[:, 0], rtol=1e-4, atol=1e-7)
    assert band.effective_parameters_ == pytest.approx(p_star, rel=1e-4)
    assert band.n_rows_ == n
    if form == "dual":
        assert "layers by hooks\n" in band.summary()  # and nothing by another way


def test_the_head_alone_and_calibrated():
    torch.manual_seed(0)
    model = bert()
    x, y = collated(sentences(N)), torch.randn(N)
    band = PredictionIntervals(model, damping=1.0, output=prediction, parameters="last").fit(x, y)
    assert band.n_parameters_ == 7
    held_out = collated(sentences(60, seed=2))
    mean, lower, upper = band.calibrate(held_out, torch.randn(60)).predict(collated(sentences(5, seed=1)))
    assert ((lower < mean) & (mean < upper)).all()


def test_a_model_without_an_output_function_is_told_of_it():
    with pytest.raises(TypeError, match=r"got SequenceClassifierOutput; pick the prediction with output="):
        PredictionIntervals(bert(), damping=1.0).fit(collated(sentences(N)), torch.randn(N))


def test_words_that_forward_does_not_take_are_said():
    band = PredictionIntervals(vit(), damping=1.0, output=prediction)
    with pytest.raises(ValueError, match=r"forward takes \(pixel_values"):
        band.fit({"pixels": torch.randn(N, 1, 4, 4)}, torch.randn(N))


def test_a_model_in_half_precision_is_told_what_to_do():
    with pytest.raises(TypeError, match=r"bfloat16, expected float32"):
        PredictionIntervals(bert().bfloat16(), damping=1.0, output=prediction)
