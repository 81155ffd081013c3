"""The test models themselves: they train, they are reproducible, and their fresh batches are valid."""

from __future__ import annotations

import pytest
import torch

from lowtide.testing.models import MODELS, SMALL, loss_of, new_batch


@pytest.mark.parametrize("name", MODELS)
def test_model_trains(name: str) -> None:
    model, args, kwargs = MODELS[name](**SMALL[name])
    loss = loss_of(model(*args, **kwargs))
    assert loss.shape == ()
    assert loss.isfinite()
    loss.backward()
    for path, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{path} has no gradient"
        assert parameter.grad.isfinite().all(), f"{path} has a gradient that is not finite"


@pytest.mark.parametrize("name", MODELS)
def test_same_seed_same_model_and_random_state_untouched(name: str) -> None:
    before = torch.get_rng_state()
    first, args, kwargs = MODELS[name](**SMALL[name])
    second, _, _ = MODELS[name](**SMALL[name])
    assert torch.equal(before, torch.get_rng_state())
    for left, right in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(left, right)
    batch = new_batch((args, kwargs), seed=3)
    torch.manual_seed(0)
    loss = loss_of(first(*batch[0], **batch[1]))
    torch.manual_seed(0)
    again = loss_of(second(*batch[0], **batch[1]))
    assert torch.equal(loss, again)


def test_new_batch_keeps_shapes_and_labels_and_differs_by_seed() -> None:
    batch = (torch.randn(4, 3), {"labels": torch.arange(10), "flag": True})
    first, second = new_batch(batch, seed=1), new_batch(batch, seed=2)
    assert first[0].shape == (4, 3)
    assert first[1]["flag"] is True
    assert sorted(first[1]["labels"].tolist()) == list(range(10))
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[0], new_batch(batch, seed=1)[0])


def test_published_sizes() -> None:
    def millions(name: str) -> float:
        return sum(parameter.numel() for parameter in MODELS[name](classes=1000)[0].parameters()) / 1e6

    assert millions("resnet50") == pytest.approx(25.557, abs=1e-3)
    assert millions("densenet121") == pytest.approx(7.979, abs=1e-3)


def test_gpt_ties_its_embedding_on_request() -> None:
    tied, untied = (MODELS["gpt"](**SMALL["gpt"], tied=tied)[0] for tied in (True, False))
    assert tied.head.weight is tied.embedding.weight
    assert untied.head.weight is not untied.embedding.weight


def test_experts_drop_tokens_beyond_their_capacity_and_weigh_the_rest() -> None:
    model, _, _ = MODELS["moe"](**SMALL["moe"])
    experts = model.blocks[0].experts
    scores = torch.tensor([[0.7, 0.2, 0.1, 0.0]] * 8)
    combine, first = experts._assign(scores)
    assert combine.shape == (8, 4, 5)
    assert (combine > 0).sum((0, 2)).tolist() == [5, 5, 0, 0]
    assert torch.allclose(combine[0].sum(), torch.tensor(1.0))
    assert combine[7].sum() == 0
    assert first.sum(0).tolist() == [8.0, 0.0, 0.0, 0.0]
